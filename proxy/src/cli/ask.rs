//! Asking the agent of this node, by its admin page.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::de::DeserializeOwned;

/// How long the agent may take to answer.
const DEADLINE: Duration = Duration::from_secs(3);

/// The status and the body of a page. Blocks for a few seconds at most.
pub(super) fn get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let code = code.ok_or_else(|| io::Error::other("the answer is no HTTP"))?;
    Ok((code, body.to_owned()))
}

/// A section of the agent's state.
pub(super) fn section<T: DeserializeOwned>(address: SocketAddr, name: &str) -> io::Result<T> {
    let (code, body) = get(address, &format!("/debug/state?section={name}"))?;
    match code {
        200 => serde_json::from_str(&body).map_err(io::Error::other),
        _ => Err(io::Error::other(body.trim_end().to_owned())),
    }
}
