//! The ways in which a program may connect.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, bail};
use socket2::{Domain, Protocol, Socket, Type};

use super::{STUCK, with_deadlines};
use crate::sys::{bind_address_no_port, fastopen_connect, uring_connect, wait_writable};

/// The ordinary way, with deadlines on the connection's reads and writes.
pub fn connect(server: SocketAddr) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, STUCK).with_context(|| format!("connect to {server}"))?;
    with_deadlines(&stream)?;
    Ok(stream)
}

/// From a source address; with port 0, the kernel chooses the port when it knows the destination. A port given may be
/// shared with other connections.
pub fn connect_from(source: SocketAddr, server: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    if source.port() == 0 {
        bind_address_no_port(&socket).context("set IP_BIND_ADDRESS_NO_PORT")?;
    } else {
        socket.set_reuse_address(true).context("set SO_REUSEADDR")?;
    }
    socket.bind(&source.into()).with_context(|| format!("bind {source}"))?;
    socket
        .connect(&server.into())
        .with_context(|| format!("connect from {source} to {server}"))?;
    finish(socket)
}

/// Like an event loop: `connect` must say EINPROGRESS or succeed; then the socket becomes writable.
pub fn connect_nonblocking(server: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&server.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            if !wait_writable(socket.as_fd(), STUCK)? {
                bail!("the non-blocking connect to {server} was not done within {STUCK:?}");
            }
            if let Some(error) = socket.take_error()? {
                return Err(error).with_context(|| format!("non-blocking connect to {server}"));
            }
        }
        Err(error) => return Err(error).with_context(|| format!("begin a non-blocking connect to {server}")),
    }
    socket.set_nonblocking(false)?;
    finish(socket)
}

/// By io_uring's `IORING_OP_CONNECT`.
pub fn connect_uring(server: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    uring_connect(&socket, server, false).with_context(|| format!("connect to {server} by io_uring"))?;
    finish(socket)
}

/// The same, called by a thread of the kernel's that polls the ring.
pub fn connect_uring_polled(server: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    uring_connect(&socket, server, true).with_context(|| format!("connect to {server} by a polled io_uring"))?;
    finish(socket)
}

/// By a socket that is prepared first, with little patience.
pub fn connect_prepared(
    server: SocketAddr,
    prepare: impl FnOnce(&Socket) -> std::io::Result<()>,
) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    prepare(&socket).context("prepare the socket")?;
    connect_patiently(&socket, server)?;
    finish(socket)
}

/// Connects a socket that is there already, with little patience.
pub fn connect_patiently(socket: &Socket, server: SocketAddr) -> anyhow::Result<()> {
    const PATIENCE: Duration = Duration::from_millis(700);
    socket
        .connect_timeout(&server.into(), PATIENCE)
        .with_context(|| format!("connect to {server}"))
}

/// With `TCP_FASTOPEN_CONNECT`: the SYN goes out with `first`.
pub fn connect_fastopen(server: SocketAddr, first: &[u8]) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    fastopen_connect(&socket).context("set TCP_FASTOPEN_CONNECT")?;
    socket
        .connect(&server.into())
        .with_context(|| format!("fast-open connect to {server}"))?;
    let mut stream = finish(socket)?;
    stream.write_all(first).context("send the first bytes")?;
    Ok(stream)
}

/// Without `connect`: `sendto` with `MSG_FASTOPEN`.
pub fn send_fastopen(server: SocketAddr, first: &[u8]) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, None)?;
    let sent = socket
        .send_to_with_flags(first, &server.into(), libc::MSG_FASTOPEN)
        .with_context(|| format!("sendto {server} with MSG_FASTOPEN"))?;
    if sent != first.len() {
        bail!("sendto sent {sent} of {} bytes", first.len());
    }
    finish(socket)
}

/// With Multipath TCP.
pub fn connect_mptcp(server: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = new_socket(server, Some(Protocol::MPTCP))?;
    socket
        .connect(&server.into())
        .with_context(|| format!("connect to {server} by MPTCP"))?;
    finish(socket)
}

/// Opens `count` connections and sends on each its number in `length` digits; they stay open.
pub fn connect_many(server: SocketAddr, count: usize, length: usize) -> anyhow::Result<Vec<TcpStream>> {
    let numbered = (0..count).map(|number| {
        let mut stream = connect(server).with_context(|| format!("connection {number} of {count}"))?;
        write!(stream, "{number:0length$}")?;
        Ok(stream)
    });
    numbered.collect()
}

fn new_socket(server: SocketAddr, protocol: Option<Protocol>) -> anyhow::Result<Socket> {
    let domain = match server.ip() {
        IpAddr::V4(_) => Domain::IPV4,
        IpAddr::V6(_) => Domain::IPV6,
    };
    Socket::new(domain, Type::STREAM, protocol).context("make a socket")
}

fn finish(socket: Socket) -> anyhow::Result<TcpStream> {
    socket.set_read_timeout(Some(STUCK))?;
    socket.set_write_timeout(Some(STUCK))?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::net::{Ending, ask_on, read_to_end};

    type Way = fn(SocketAddr) -> anyhow::Result<TcpStream>;

    const WAYS: [(&str, Way); 4] = [
        ("plain", connect),
        ("non-blocking", connect_nonblocking),
        ("io_uring", connect_uring),
        ("from a source", |server| {
            connect_from(([127, 0, 0, 2], 0).into(), server)
        }),
    ];

    #[test]
    fn every_way_connects_and_carries_bytes() {
        for (name, way) in WAYS {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let server = listener.local_addr().unwrap();
            let thread = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let (text, _) = read_to_end(&stream);
                stream.write_all(text.as_bytes()).unwrap();
            });
            let seen = ask_on(way(server).unwrap(), name).unwrap();
            assert_eq!((seen.text.as_str(), seen.ending), (name, Ending::Fin));
            thread.join().unwrap();
        }
    }

    #[test]
    fn every_way_reports_a_refusal_with_its_errno() {
        for (name, way) in WAYS {
            let server = {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                listener.local_addr().unwrap()
            };
            let error = way(server).unwrap_err();
            assert_eq!(crate::bed::errno(&error), Some(libc::ECONNREFUSED), "{name}: {error:#}");
        }
    }
}
