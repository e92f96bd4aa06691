//! Asking a page like these: what commands know of a process that runs.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The status and the body of a page. Each step of it may take as long as `deadline`. Blocks.
pub(crate) fn ask(address: SocketAddr, path: &str, deadline: Duration) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, deadline)?;
    stream.set_read_timeout(Some(deadline))?;
    stream.set_write_timeout(Some(deadline))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let code = code.ok_or_else(|| io::Error::other("the answer is no HTTP"))?;
    Ok((code, body.to_owned()))
}
