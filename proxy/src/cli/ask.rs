//! Asking the agent of this node, by its admin page.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::admin;

/// How long the agent may take to answer.
const DEADLINE: Duration = Duration::from_secs(3);

/// The status and the body of a page. Blocks for a few seconds at most.
pub(super) fn get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    admin::ask(address, path, DEADLINE)
}

/// A section of the agent's state.
pub(super) fn section<T: DeserializeOwned>(address: SocketAddr, name: &str) -> io::Result<T> {
    let (code, body) = get(address, &format!("/debug/state?section={name}"))?;
    match code {
        200 => serde_json::from_str(&body).map_err(io::Error::other),
        _ => Err(io::Error::other(body.trim_end().to_owned())),
    }
}
