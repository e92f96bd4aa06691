//! What is known of one connection, from its acceptance to its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::identity::SpiffeId;
use crate::mesh::{Service, Workload};

/// Which end of the connection this proxy stands at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reporter {
    /// At the client's: the connection leaves a pod of this node.
    Source,
    /// At the server's: the connection enters a pod of this node.
    Destination,
}

/// How the connection travels between its two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// In a tunnel with mutual TLS.
    Hbone,
    /// In plaintext, to or from a peer outside the mesh.
    Plain,
    /// Between two pods of this node, through this proxy alone.
    Local,
    /// From socket to socket, by the kernel's own decision; no byte passes this proxy.
    Direct,
}

impl Path {
    /// The word used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hbone => "hbone",
            Self::Plain => "plain",
            Self::Local => "local",
            Self::Direct => "direct",
        }
    }
}

/// The process that called `connect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Author {
    /// Its process id, in the initial PID namespace.
    pub pid: u32,
    /// Its command name (`comm`), at most 15 bytes.
    pub command: Box<str>,
    /// Its cgroup's id.
    pub cgroup: u64,
}

/// One end of a connection.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// The address, as the application at the other end sees it.
    pub addr: Option<SocketAddr>,
    /// The workload, where it is known.
    pub workload: Option<Arc<Workload>>,
    /// The identity that was proven: by a certificate, or by the network namespace of a pod of this node.
    pub identity: Option<SpiffeId>,
}

/// A connection that this proxy carries or refuses.
#[derive(Debug)]
pub struct Connection {
    /// Unique within the life of this process.
    pub id: u64,
    /// When it was accepted.
    pub opened: SystemTime,
    /// Which end this proxy stands at.
    pub reporter: Reporter,
    /// How it travels.
    pub path: Path,
    /// The client.
    pub source: Peer,
    /// The server.
    pub destination: Peer,
    /// The service that the client dialled, where it dialled one.
    pub service: Option<Arc<Service>>,
    /// The process that dialled, known at the source; at the destination, for probes by the node's kubelet.
    pub author: Option<Author>,
    /// The tunnel's far end, where it is in a tunnel.
    pub tunnel: Option<SocketAddr>,
    /// The serial number of the certificate that this proxy showed, where it is in a tunnel.
    pub certificate_serial: Option<Arc<str>>,
    /// Bytes that the client has sent on to the server, so far.
    pub sent: AtomicU64,
    /// Bytes that the server has sent on to the client, so far.
    pub received: AtomicU64,
}

impl Connection {
    /// Bytes moved so far: from client to server, from server to client.
    pub fn bytes(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }
}

/// Who brought a connection to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Party {
    /// The client, or the network on its side.
    Source,
    /// The server, or the network on its side.
    Destination,
    /// This proxy.
    Proxy,
    /// One of the two ends: the kernel, which let the connection through, does not tell which.
    Unknown,
}

impl Party {
    /// The word used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Proxy => "proxy",
            Self::Unknown => "unknown",
        }
    }
}

/// How far a connection had come when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Accepted; its original destination was looked up.
    Accept,
    /// Source, destination and policy were being decided.
    Decide,
    /// The source's or destination's certificate was awaited.
    Identity,
    /// The next hop was dialled: the tunnel's peer, the application, or the plain destination.
    Connect,
    /// TLS with the tunnel's peer.
    Handshake,
    /// The CONNECT request was sent and its answer awaited.
    Request,
    /// Bytes were flowing.
    Relay,
}

impl Phase {
    /// The word used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Decide => "decide",
            Self::Identity => "identity",
            Self::Connect => "connect",
            Self::Handshake => "handshake",
            Self::Request => "request",
            Self::Relay => "relay",
        }
    }
}

/// By what a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// Both sides closed in order; the party is the one that closed first.
    Fin,
    /// A reset, or a stream reset in a tunnel.
    Reset,
    /// A deadline passed.
    Timeout,
    /// Refused by policy; the text names the deciding rule.
    Policy(String),
    /// This proxy was told to stop.
    Drain,
    /// The next hop refused or could not be reached; the text says what and why.
    Refused(String),
    /// The certificate needed was not to be had, or the peer's was not acceptable; the text says why.
    Identity(String),
    /// Anything else that went wrong; the text says what.
    Error(String),
}

impl How {
    /// The word used in logs.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Fin => "fin",
            Self::Reset => "reset",
            Self::Timeout => "timeout",
            Self::Policy(_) => "policy",
            Self::Drain => "drain",
            Self::Refused(_) => "refused",
            Self::Identity(_) => "identity",
            Self::Error(_) => "error",
        }
    }

    /// What more is known: the rule, or the reason.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Policy(text) | Self::Refused(text) | Self::Identity(text) | Self::Error(text) => Some(text),
            Self::Fin | Self::Reset | Self::Timeout | Self::Drain => None,
        }
    }
}

/// A connection's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// Who ended it.
    pub by: Party,
    /// How far it had come.
    pub phase: Phase,
    /// By what.
    pub how: How,
    /// From acceptance to end.
    pub duration: Duration,
    /// What the kernel measured, where the connection went direct.
    pub measured: Option<Measured>,
}

/// What the kernel measured of a direct connection, at the end that is this proxy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// The smoothed round-trip time.
    pub round_trip: Duration,
    /// Segments that were sent again.
    pub retransmits: u32,
}

/// What the data plane tells of the connections it carries. Called on the data path: must not block.
pub trait Observer: Send + Sync {
    /// The connection is established on both sides and bytes may flow.
    fn opened(&self, connection: &Arc<Connection>);
    /// The connection has ended, or was refused; called once for each connection, whether or not it was opened.
    fn closed(&self, connection: &Connection, end: &End);
    /// A policy in dry-run mode would have refused the connection; `rule` names it.
    fn would_deny(&self, connection: &Connection, rule: &str);
    /// A connection is refused because its pod has as many as it may have.
    fn no_place(&self);
    /// A TLS handshake with a tunnel's peer took this long.
    fn handshake(&self, reporter: Reporter, took: Duration);
}
