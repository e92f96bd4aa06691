//! One connection's record as it grows, told to the observer at its ends.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Instant, SystemTime};

use super::Dataplane;
use super::record::{Connection, End, How, Party, Path, Peer, Phase, Reporter};
use crate::relay::{Fault, Grounds, Outcome, Side};

/// How a connection ends that is not relayed to its end.
pub(super) type Refusal = (Party, How);

/// A connection's record. However the connection's task ends, the observer hears of it, once.
pub(super) struct Track {
    plane: Arc<Dataplane>,
    started: Instant,
    phase: Phase,
    state: State,
}

enum State {
    /// Not yet established: still being filled in.
    Draft(Box<Connection>),
    Open(Arc<Connection>),
    Ended,
}

impl Track {
    pub(super) fn new(plane: &Arc<Dataplane>, reporter: Reporter, path: Path, phase: Phase) -> Self {
        let draft = Connection {
            id: plane.next_id(),
            opened: SystemTime::now(),
            reporter,
            path,
            source: Peer::default(),
            destination: Peer::default(),
            service: None,
            author: None,
            tunnel: None,
            certificate_serial: None,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        };
        Self {
            plane: Arc::clone(plane),
            started: Instant::now(),
            phase,
            state: State::Draft(Box::new(draft)),
        }
    }

    /// The record, to be filled in while the connection is not established.
    pub(super) fn draft(&mut self) -> Option<&mut Connection> {
        match &mut self.state {
            State::Draft(draft) => Some(draft),
            State::Open(_) | State::Ended => None,
        }
    }

    /// The record.
    pub(super) fn connection(&self) -> Option<&Connection> {
        match &self.state {
            State::Draft(draft) => Some(draft),
            State::Open(connection) => Some(connection),
            State::Ended => None,
        }
    }

    /// How far the connection has come.
    pub(super) fn phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// A policy in dry-run mode would have refused the connection.
    pub(super) fn would_deny(&self, rule: &str) {
        if let Some(connection) = self.connection() {
            self.plane.observer.would_deny(connection, rule);
        }
    }

    /// The connection is established: the record is final, but for its counters.
    pub(super) fn open(&mut self) -> Arc<Connection> {
        self.phase = Phase::Relay;
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Draft(draft) => {
                let connection = Arc::new(*draft);
                self.plane.observer.opened(&connection);
                self.state = State::Open(Arc::clone(&connection));
                connection
            }
            State::Open(connection) => {
                self.state = State::Open(Arc::clone(&connection));
                connection
            }
            State::Ended => unreachable!("a connection is opened before it ends"),
        }
    }

    /// The connection has ended.
    pub(super) fn end(&mut self, (by, how): Refusal) {
        let state = std::mem::replace(&mut self.state, State::Ended);
        let end = End {
            by,
            phase: self.phase,
            how,
            duration: self.started.elapsed(),
            measured: None,
        };
        match &state {
            State::Draft(connection) => self.plane.observer.closed(connection, &end),
            State::Open(connection) => self.plane.observer.closed(connection, &end),
            State::Ended => {}
        }
    }

    /// There is nothing to tell: the connection is a tunnel, whose streams have records of their own.
    pub(super) fn forget(mut self) {
        self.state = State::Ended;
    }

    /// The connection was relayed to its end.
    pub(super) fn end_of_relay(&mut self, outcome: Outcome) {
        let party = |side| match side {
            Side::Client => Party::Source,
            Side::Server => Party::Destination,
        };
        self.end(match outcome {
            Outcome::Closed(side) => (party(side), How::Fin),
            Outcome::Broken(side, Fault::Reset | Fault::Stopped) => (party(side), How::Reset),
            Outcome::Broken(side, Fault::Forbidden) => {
                let how =
                    How::Policy("a policy that the other end's proxy enforces; its log names the rule".to_owned());
                (party(side), how)
            }
            Outcome::Broken(side, Fault::Timeout) => (party(side), How::Timeout),
            Outcome::Broken(side, Fault::Other(text)) => (party(side), How::Error(text)),
            Outcome::Cut(Grounds::Policy, rule) => (Party::Proxy, How::Policy(rule)),
            Outcome::Cut(Grounds::Identity, reason) => (Party::Proxy, How::Identity(reason)),
        });
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        // Its task was given up: the pod has left, or the process ends.
        self.end((Party::Proxy, How::Drain));
    }
}
