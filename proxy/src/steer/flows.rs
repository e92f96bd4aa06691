//! What the programs and the proxy tell each other about single connections.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use adit_common::{Flow, FlowKey, HostPort};

use super::error::at;
use super::{SteerError, sys};

/// Where a captured connection was going, and who dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginalDst {
    /// The address that the application dialled.
    pub addr: SocketAddr,
    /// The endpoint that the kernel has chosen, where that is a service's.
    pub endpoint: Option<SocketAddr>,
    /// The process that dialled, in the initial PID namespace.
    pub pid: u32,
    /// Its cgroup's id.
    pub cgroup: u64,
    /// Its command name, at most 15 bytes.
    pub command: Box<str>,
}

/// Captured connections whose SYN is on its way.
#[derive(Clone)]
pub struct Flows {
    map: Arc<OwnedFd>,
}

impl Flows {
    pub(super) fn new(map: Arc<OwnedFd>) -> Self {
        Self { map }
    }

    /// Takes the entry of the connection from `client`, in the namespace `netns`, that was accepted at `server_port`.
    /// None: nobody captured such a connection; somebody dialled the listener itself.
    pub fn take(&self, netns: u64, client: SocketAddr, server_port: u16) -> Result<Option<OriginalDst>, SteerError> {
        let key = key(netns, client, server_port);
        let flow: Option<Flow> =
            sys::take(self.map.as_fd(), &key).map_err(at("taking a captured connection's entry"))?;
        Ok(flow.map(|flow| OriginalDst {
            addr: SocketAddr::new(flow.addr.into(), flow.port.0),
            endpoint: (!flow.endpoint.addr.is_none())
                .then(|| SocketAddr::new(flow.endpoint.addr.into(), flow.endpoint.port.0)),
            pid: flow.pid,
            cgroup: flow.cgroup,
            command: command(&flow.command),
        }))
    }

    /// Removes entries that `seen`, the last sweep, has seen already, and notes those there are now. Such connections
    /// were established, but nobody accepted them: their pod has left in the meantime, or the kernel gave them up.
    pub fn sweep(&self, seen: &mut HashSet<FlowKey>) -> Result<usize, SteerError> {
        sweep(self.map.as_fd(), seen)
    }
}

/// Connections that the proxy makes to applications on behalf of others.
#[derive(Clone)]
pub struct Clients {
    map: Arc<OwnedFd>,
}

impl Clients {
    pub(super) fn new(map: Arc<OwnedFd>) -> Self {
        Self { map }
    }

    /// Tells, before the connection is made, that what will come from `local` to `server_port` in `netns` is really
    /// from `client`. The entry is gone once the connection stands; [`Clients::withdraw`] it when the dial fails.
    pub fn publish(
        &self,
        netns: u64,
        local: SocketAddr,
        server_port: u16,
        client: SocketAddr,
    ) -> Result<(), SteerError> {
        let flow = Flow {
            addr: client.ip().into(),
            port: HostPort(client.port()),
            ..Flow::default()
        };
        sys::update(self.map.as_fd(), &key(netns, local, server_port), &flow, 0)
            .map_err(at("telling an application's true client"))
    }

    /// As [`Flows::sweep`]: connections that stood, but that no application's socket was made for.
    pub fn sweep(&self, seen: &mut HashSet<FlowKey>) -> Result<usize, SteerError> {
        sweep(self.map.as_fd(), seen)
    }

    /// Takes back what was published.
    pub fn withdraw(&self, netns: u64, local: SocketAddr, server_port: u16) {
        // A key that is not there is no error, and the map takes any key.
        let _ = sys::delete(self.map.as_fd(), &key(netns, local, server_port));
    }
}

/// Removes entries that `seen` has already, and makes that what there is now.
fn sweep(map: BorrowedFd<'_>, seen: &mut HashSet<FlowKey>) -> Result<usize, SteerError> {
    let at = at("sweeping connections that nobody took");
    let mut now = HashSet::new();
    let mut key: Option<FlowKey> = sys::next_key(map, None).map_err(at)?;
    while let Some(last) = key {
        key = sys::next_key(map, Some(&last)).map_err(at)?;
        now.insert(last);
    }
    let stale: Vec<FlowKey> = now.intersection(seen).copied().collect();
    for key in &stale {
        sys::delete(map, key).map_err(at)?;
        now.remove(key);
    }
    *seen = now;
    Ok(stale.len())
}

fn key(netns: u64, client: SocketAddr, server_port: u16) -> FlowKey {
    let ip: IpAddr = client.ip();
    FlowKey::new(netns, ip.into(), HostPort(client.port()), HostPort(server_port))
}

/// A command name as the kernel gives it: ended by a zero byte.
pub fn command(bytes: &[u8]) -> Box<str> {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into()
}
