//! An application's TCP connection as a side of a relay.

use std::cell::{OnceCell, RefCell};
use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::{Broken, Fault, Outcome, Read, Write};
use crate::node::read_available;

/// What one read takes at most.
const CHUNK: usize = 256 << 10;
/// Up to here a chunk is copied out of the buffer it was read into, so that a small one that waits does not hold a
/// large buffer.
const COPIED: usize = 8 << 10;

thread_local! {
    /// The buffer that the worker's next read goes into.
    static BUFFER: RefCell<BytesMut> = RefCell::new(BytesMut::new());
}

/// An application's connection. Dropping it resets it, and so does the end of the process, unless it was told to close in
/// order: an application never takes a connection that was broken off for one that has ended.
#[derive(Debug)]
pub struct AppStream {
    tcp: TcpStream,
    /// What the kernel tells but once. In a box, as few connections come to this.
    broken: OnceCell<Box<Broken>>,
}

impl AppStream {
    /// Takes over a connection.
    pub fn new(tcp: TcpStream) -> Self {
        // With no time to linger, close resets, whoever closes. It cannot fail on a socket.
        let _ = SockRef::from(&tcp).set_linger(Some(Duration::ZERO));
        Self {
            tcp,
            broken: OnceCell::new(),
        }
    }

    /// The two directions.
    pub fn split(&self) -> (TcpReader<'_>, TcpWriter<'_>) {
        (
            TcpReader { stream: self },
            TcpWriter {
                stream: self,
                error: None,
            },
        )
    }

    /// Sends a short answer, and lets the connection close in order.
    pub async fn answer(&self, bytes: &[u8]) -> io::Result<()> {
        self.tcp.writable().await?;
        self.tcp.try_write(bytes)?;
        SockRef::from(&self.tcp).set_linger(None)
    }

    /// Lets the connection close in order where both directions have ended.
    pub fn close_if(&self, outcome: &Outcome) {
        if matches!(outcome, Outcome::Closed(_)) {
            let _ = SockRef::from(&self.tcp).set_linger(None);
        }
    }

    /// What an end of what is read means: none, or that the connection was found broken before.
    fn end(&self) -> Result<(), Fault> {
        match self.broken.get() {
            Some(broken) if !broken.ended => Err(broken.fault.clone()),
            _ => Ok(()),
        }
    }
}

/// The reading half.
pub struct TcpReader<'a> {
    stream: &'a AppStream,
}

impl Read for TcpReader<'_> {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Fault>> {
        let tcp = &self.stream.tcp;
        loop {
            // Most often there is nothing, for which no buffer is needed.
            ready!(tcp.poll_read_ready(cx)).map_err(|error| fault(&error))?;
            let chunk = BUFFER.with_borrow_mut(|buffer| {
                buffer.reserve(CHUNK);
                let read = read_available(tcp, buffer)?;
                if read > COPIED {
                    return Ok(std::mem::take(buffer).freeze());
                }
                let chunk = Bytes::copy_from_slice(buffer);
                buffer.clear();
                Ok::<_, io::Error>(chunk)
            });
            return Poll::Ready(match chunk {
                Ok(chunk) if chunk.is_empty() => self.stream.end().map(|()| None),
                Ok(chunk) => Ok(Some(chunk)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => Err(fault(&error)),
            });
        }
    }
}

/// The writing half.
pub struct TcpWriter<'a> {
    stream: &'a AppStream,
    /// Waits for an error. In a box, as few connections are ever watched.
    error: Option<Pin<Box<dyn Future<Output = Broken> + 'a>>>,
}

impl Write for TcpWriter<'_> {
    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Fault>> {
        while !chunk.is_empty() {
            match self.stream.tcp.try_write(chunk) {
                Ok(written) => drop(chunk.split_to(written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.stream.tcp.poll_write_ready(cx)).map_err(|error| fault(&error))?;
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

    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Broken> {
        let stream = self.stream;
        if let Some(found) = stream.broken.get() {
            return Poll::Ready(Broken::clone(found));
        }
        let error = self.error.get_or_insert_with(|| Box::pin(broken(&stream.tcp)));
        let found = ready!(error.as_mut().poll(cx));
        Poll::Ready(Broken::clone(stream.broken.get_or_init(|| Box::new(found))))
    }

    fn abort(&mut self, _: bool) {
        // The stream's drop resets it.
    }
}

async fn broken(tcp: &TcpStream) -> Broken {
    let error = match tcp.ready(Interest::ERROR).await {
        Ok(_) => SockRef::from(tcp).take_error(),
        Err(error) => Ok(Some(error)),
    };
    match error {
        Ok(Some(error)) => Broken {
            fault: fault(&error),
            // What the kernel calls a reset that comes after a FIN.
            ended: error.kind() == io::ErrorKind::BrokenPipe,
        },
        // Reported and cleared elsewhere; an error there was.
        _ => Broken {
            fault: Fault::Reset,
            ended: false,
        },
    }
}

fn fault(error: &io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => Fault::Reset,
        io::ErrorKind::TimedOut => Fault::Timeout,
        _ => Fault::Other(error.to_string()),
    }
}
