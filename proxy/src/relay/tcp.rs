//! An application's TCP connection as a side of a relay.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::{Fault, Outcome, Read, Write};

/// What one read takes at most.
const CHUNK: usize = 64 << 10;
/// Up to here a chunk is copied out of the buffer it was read into, so that a small one that waits does not hold a
/// large buffer.
const COPIED: usize = 8 << 10;

thread_local! {
    /// The buffer that the worker's next read goes into.
    static BUFFER: RefCell<BytesMut> = RefCell::new(BytesMut::new());
}

/// An application's connection. Dropping it resets it, unless it was told to close in order: an application never
/// takes a connection that was broken off for one that has ended.
#[derive(Debug)]
pub struct AppStream {
    tcp: TcpStream,
    in_order: Cell<bool>,
}

impl AppStream {
    /// Takes over a connection.
    pub fn new(tcp: TcpStream) -> Self {
        Self {
            tcp,
            in_order: Cell::new(false),
        }
    }

    /// The two directions.
    pub fn split(self: &Rc<Self>) -> (TcpReader, TcpWriter) {
        (
            TcpReader {
                stream: Rc::clone(self),
            },
            TcpWriter {
                stream: Rc::clone(self),
                broken: None,
            },
        )
    }

    /// Lets the connection close in order where both directions have ended.
    pub fn close_if(&self, outcome: &Outcome) {
        self.in_order.set(matches!(outcome, Outcome::Closed(_)));
    }
}

impl Drop for AppStream {
    fn drop(&mut self) {
        if !self.in_order.get() {
            // With no time to linger, close resets.
            let _ = SockRef::from(&self.tcp).set_linger(Some(Duration::ZERO));
        }
    }
}

/// The reading half.
pub struct TcpReader {
    stream: Rc<AppStream>,
}

impl Read for TcpReader {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Fault>> {
        let tcp = &self.stream.tcp;
        loop {
            ready!(tcp.poll_read_ready(cx)).map_err(|error| fault(&error))?;
            let result = BUFFER.with_borrow_mut(|buffer| {
                buffer.reserve(CHUNK);
                let read = tcp.try_read_buf(buffer)?;
                if read > COPIED {
                    return Ok(std::mem::take(buffer).freeze());
                }
                let chunk = Bytes::copy_from_slice(buffer);
                buffer.clear();
                Ok::<_, io::Error>(chunk)
            });
            return match result {
                Ok(chunk) if chunk.is_empty() => Poll::Ready(Ok(None)),
                Ok(chunk) => Poll::Ready(Ok(Some(chunk))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => Poll::Ready(Err(fault(&error))),
            };
        }
    }
}

/// The writing half.
pub struct TcpWriter {
    stream: Rc<AppStream>,
    broken: Option<Pin<Box<dyn Future<Output = Fault>>>>,
}

impl Write for TcpWriter {
    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Fault>> {
        let tcp = &self.stream.tcp;
        while !chunk.is_empty() {
            match tcp.try_write(chunk) {
                Ok(written) => drop(chunk.split_to(written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(tcp.poll_write_ready(cx)).map_err(|error| fault(&error))?;
                }
                Err(error) => return Poll::Ready(Err(fault(&error))),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn finish(&mut self) -> Result<(), Fault> {
        match SockRef::from(&self.stream.tcp).shutdown(Shutdown::Write) {
            // Gone in the meantime: its reading half tells how.
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(fault(&error)),
            _ => Ok(()),
        }
    }

    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let stream = &self.stream;
        self.broken
            .get_or_insert_with(|| {
                let stream = Rc::clone(stream);
                Box::pin(async move {
                    match stream.tcp.ready(Interest::ERROR).await {
                        Ok(_) => match SockRef::from(&stream.tcp).take_error() {
                            Ok(Some(error)) => fault(&error),
                            // Reported and cleared elsewhere; an error there was.
                            _ => Fault::Reset,
                        },
                        Err(error) => fault(&error),
                    }
                })
            })
            .as_mut()
            .poll(cx)
    }

    fn abort(&mut self) {
        // The stream's drop resets it.
    }
}

fn fault(error: &io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => Fault::Reset,
        io::ErrorKind::TimedOut => Fault::Timeout,
        _ => Fault::Other(error.to_string()),
    }
}
