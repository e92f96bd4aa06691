//! What tests do inside pods: servers and clients that report exactly what the kernel showed them.
//!
//! All of it blocks, with a deadline on every read, and runs in the processes that [`Pod::run`](crate::bed::Pod::run)
//! and its kin make.

mod connect;
mod data;
mod handmade;
mod steady;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockRef, Socket, Type};

use crate::bed::Stage;

pub use self::connect::{
    connect, connect_fastopen, connect_from, connect_many, connect_mptcp, connect_nonblocking, connect_patiently,
    connect_prepared, connect_uring, connect_uring_polled, send_fastopen,
};
pub use self::data::{Digest, drain, drain_slowly, send_pattern};
pub use self::handmade::{Handmade, Wire, syn_with_data};
pub use self::steady::{Outcome, Steady};
pub use crate::sys::{
    attach_connect4, detach_connect4, disconnect, fastopen_listen, keep_capabilities, load_allow_all, open_some_link,
    pass_socket, repair, source_route, take_socket,
};

/// How long a read waits before it counts as stuck.
pub const STUCK: Duration = Duration::from_secs(8);

/// By what a stream ended for its reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Ending {
    /// In order: the other side closed or half-closed.
    Fin,
    /// By an error of the operating system, such as `ECONNRESET`.
    Errno(i32),
    /// Not at all within the deadline.
    Stuck,
}

impl Ending {
    /// A connection that was reset.
    pub const RESET: Self = Self::Errno(libc::ECONNRESET);

    fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Stuck,
            _ => Self::Errno(error.raw_os_error().unwrap_or(0)),
        }
    }
}

/// What one end of a connection saw of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// `getpeername`, or what `accept` returned.
    pub peer: SocketAddr,
    /// `getsockname`.
    pub local: SocketAddr,
    /// What was read.
    pub text: String,
    /// How reading ended.
    pub ending: Ending,
}

/// How an attempt to reach a server went that is expected to be refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// The error of `connect`, if it failed.
    pub connect: Option<i32>,
    /// What was read afterwards, if it did not.
    pub text: String,
    /// How reading ended, if `connect` did not fail.
    pub ending: Option<Ending>,
    /// From the call of `connect` to the end, in milliseconds.
    pub took_ms: u64,
}

impl Attempt {
    /// Whether the client was told "no" plainly: by an error of `connect` or by a reset before the first byte. An
    /// orderly end or silence would be a lie.
    pub fn was_refused(&self) -> bool {
        self.text.is_empty()
            && match (self.connect, self.ending) {
                (Some(errno), _) => [libc::ECONNREFUSED, libc::EPERM, libc::ECONNRESET].contains(&errno),
                (None, ending) => ending == Some(Ending::RESET),
            }
    }
}

/// A listener with a long backlog that may take an address in TIME_WAIT.
pub fn listen(address: impl ToSocketAddrs) -> anyhow::Result<TcpListener> {
    let address = address.to_socket_addrs()?.next().context("no address to listen on")?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket
        .bind(&address.into())
        .with_context(|| format!("bind {address}"))?;
    socket.listen(4096).with_context(|| format!("listen on {address}"))?;
    Ok(socket.into())
}

/// Listens, tells the test so, accepts one connection and gives it to `handle`.
pub fn serve_one<T>(
    stage: &Stage,
    address: impl ToSocketAddrs,
    handle: impl FnOnce(TcpStream, SocketAddr) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let listener = listen(address)?;
    stage.reached(listener.local_addr()?)?;
    let (stream, peer) = listener.accept()?;
    with_deadlines(&stream)?;
    handle(stream, peer)
}

/// Serves one connection: sends back what comes, and at its end closes and says what it saw.
pub fn echo_once(stage: &Stage, address: impl ToSocketAddrs) -> anyhow::Result<Seen> {
    serve_one(stage, address, echo)
}

/// Serves connections for ever, each on a thread: sends back what comes. Ends when the [`Running`] is dropped.
///
/// [`Running`]: crate::bed::Running
pub fn echo_forever(stage: &Stage, address: impl ToSocketAddrs) -> anyhow::Result<()> {
    let listener = listen(address)?;
    stage.reached(listener.local_addr()?)?;
    for stream in listener.incoming() {
        // Clients may be gone already, or too many; the next ones matter more.
        let Ok(mut stream) = stream else { continue };
        std::thread::spawn(move || {
            let mut buffer = [0; 16 << 10];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                if stream.write_all(&buffer[..count]).is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Serves connections for ever, each on a thread: reads nothing, says its own address to each and closes.
pub fn name_forever(stage: &Stage, address: impl ToSocketAddrs, name: &str) -> anyhow::Result<()> {
    let listener = listen(address)?;
    stage.reached(listener.local_addr()?)?;
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let _ = stream.write_all(name.as_bytes());
    }
    Ok(())
}

fn echo(mut stream: TcpStream, peer: SocketAddr) -> anyhow::Result<Seen> {
    let local = stream.local_addr()?;
    let mut text = Vec::new();
    let mut buffer = [0; 16 << 10];
    let ending = loop {
        match stream.read(&mut buffer) {
            Ok(0) => break Ending::Fin,
            Ok(count) => {
                text.extend_from_slice(&buffer[..count]);
                stream.write_all(&buffer[..count]).context("echo")?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break Ending::of(&error),
        }
    };
    Ok(Seen {
        peer,
        local,
        text: String::from_utf8_lossy(&text).into_owned(),
        ending,
    })
}

/// Connects, sends `text`, ends its side and reads to the end.
pub fn ask(server: SocketAddr, text: &str) -> anyhow::Result<Seen> {
    ask_on(connect(server)?, text)
}

/// On an open connection: sends `text`, ends this side and reads to the end.
pub fn ask_on(mut stream: TcpStream, text: &str) -> anyhow::Result<Seen> {
    with_deadlines(&stream)?;
    let peer = stream.peer_addr().context("getpeername")?;
    let local = stream.local_addr().context("getsockname")?;
    stream.write_all(text.as_bytes()).context("send the question")?;
    stream.shutdown(Shutdown::Write).context("end the question")?;
    let (text, ending) = read_to_end(&stream);
    Ok(Seen {
        peer,
        local,
        text,
        ending,
    })
}

/// Connects and reads, without a word of its own, to see whether and how it is refused.
pub fn attempt(server: SocketAddr) -> anyhow::Result<Attempt> {
    let begin = Instant::now();
    let (connect, text, ending) = match TcpStream::connect_timeout(&server, STUCK) {
        Ok(stream) => {
            with_deadlines(&stream)?;
            let (text, ending) = read_to_end(&stream);
            (None, text, Some(ending))
        }
        Err(error) => (
            Some(error.raw_os_error().unwrap_or(libc::ETIMEDOUT)),
            String::new(),
            None,
        ),
    };
    let took_ms = u64::try_from(begin.elapsed().as_millis())?;
    Ok(Attempt {
        connect,
        text,
        ending,
        took_ms,
    })
}

/// Reads to the end and says how it came.
pub fn read_to_end(mut stream: &TcpStream) -> (String, Ending) {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    let ending = loop {
        match stream.read(&mut buffer) {
            Ok(0) => break Ending::Fin,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            // A ring that the kernel is still taking down may wake its process.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break Ending::of(&error),
        }
    };
    (String::from_utf8_lossy(&bytes).into_owned(), ending)
}

/// Reads exactly so many bytes as text.
pub fn read_text(stream: &mut TcpStream, length: usize) -> anyhow::Result<String> {
    let mut bytes = vec![0; length];
    stream
        .read_exact(&mut bytes)
        .with_context(|| format!("read {length} bytes"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Closes the connection with a reset instead of an orderly end.
pub fn reset(stream: TcpStream) -> anyhow::Result<()> {
    SockRef::from(&stream)
        .set_linger(Some(Duration::ZERO))
        .context("set SO_LINGER")?;
    drop(stream);
    Ok(())
}

/// Makes reads and writes fail that are stuck.
pub fn with_deadlines(stream: &TcpStream) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(STUCK))?;
    stream.set_write_timeout(Some(STUCK))?;
    Ok(())
}

/// Raises the limit on open files of this process as far as it goes.
pub fn raise_open_files() -> anyhow::Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = hard.max(65_536);
    setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, hard, hard))?;
    Ok(())
}

/// Listens, accepts `count` connections and reads `length` bytes from each; only when all are open at once does it
/// answer each with what it sent. Gives the addresses of the clients.
pub fn answer_when_all_are_there(
    stage: &Stage,
    address: impl ToSocketAddrs,
    count: usize,
    length: usize,
) -> anyhow::Result<Vec<SocketAddr>> {
    raise_open_files()?;
    let listener = listen(address)?;
    stage.reached(listener.local_addr()?)?;
    let mut open = Vec::with_capacity(count);
    let mut peers = Vec::with_capacity(count);
    while open.len() < count {
        let (mut stream, peer) = listener.accept()?;
        with_deadlines(&stream)?;
        let text = read_text(&mut stream, length).with_context(|| format!("connection {}", open.len()))?;
        open.push((stream, text));
        peers.push(peer);
    }
    for (stream, text) in &mut open {
        stream.write_all(text.as_bytes())?;
    }
    for (stream, _) in &mut open {
        let (_, _ending) = read_to_end(stream);
    }
    Ok(peers)
}
