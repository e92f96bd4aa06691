//! How a direct connection ended, by what the kernel tells of its socket.

use std::net::SocketAddr;

use adit_common::{DirectEnd, DirectKind};

use crate::dataplane::record::{How, Party, Phase, Reporter};

/// The kernel's numbers of a socket's states.
pub(super) mod state {
    /// There was no socket yet: the kernel has refused the connection.
    pub(in super::super) const REFUSED: u32 = 0;
    pub(in super::super) const SYN_SENT: u32 = 2;
    pub(in super::super) const FIN_WAIT1: u32 = 4;
    pub(in super::super) const FIN_WAIT2: u32 = 5;
    pub(in super::super) const TIME_WAIT: u32 = 6;
    pub(in super::super) const CLOSE_WAIT: u32 = 8;
    pub(in super::super) const LAST_ACK: u32 = 9;
    pub(in super::super) const CLOSING: u32 = 11;
    /// None of the kernel's: the socket is gone, and the kernel has not told how.
    pub(in super::super) const GONE: u32 = u32::MAX;
}

/// How a connection ended, by the last state of the socket at `reporter`'s end.
pub(super) fn outcome(last: u32, reporter: Reporter, to: Option<SocketAddr>) -> (Party, Phase, How) {
    let (this, other) = match reporter {
        Reporter::Source => (Party::Source, Party::Destination),
        Reporter::Destination => (Party::Destination, Party::Source),
    };
    match last {
        state::SYN_SENT => {
            let to = to.map(|to| format!(" to {to}")).unwrap_or_default();
            let how = How::Refused(format!(
                "connecting{to}: refused, unreachable, or given up by the client"
            ));
            (Party::Unknown, Phase::Connect, how)
        }
        state::FIN_WAIT2 | state::TIME_WAIT | state::CLOSING => (this, Phase::Relay, How::Fin),
        state::LAST_ACK => (other, Phase::Relay, How::Fin),
        state::GONE => {
            let why = "its socket is gone, and the kernel has not told of the end";
            (Party::Unknown, Phase::Relay, How::Error(why.to_owned()))
        }
        // This end had closed, and heard no more in order.
        state::FIN_WAIT1 => (other, Phase::Relay, How::Reset),
        _ => (Party::Unknown, Phase::Relay, How::Reset),
    }
}

/// Bytes from client to server, and from server to client: what the kernel has counted, less what SYN and FIN count.
pub(super) fn bytes(end: &DirectEnd) -> (u64, u64) {
    let outbound = end.direct.kind == DirectKind::Outbound as u16;
    // The accepting side's SYN is acknowledged before it has a socket.
    let syn = u64::from(outbound && end.direct.state != state::SYN_SENT);
    let fin_acked = u64::from(matches!(
        end.direct.state,
        state::FIN_WAIT2 | state::TIME_WAIT | state::CLOSING | state::LAST_ACK
    ));
    let fin_received = match end.direct.state {
        state::CLOSE_WAIT | state::LAST_ACK | state::CLOSING | state::TIME_WAIT => true,
        state::FIN_WAIT2 => end.direct.received > end.direct.half_closed_received,
        _ => false,
    };
    let sent = end.direct.acked.saturating_sub(syn + fin_acked);
    let received = end.direct.received.saturating_sub(u64::from(fin_received));
    if outbound { (sent, received) } else { (received, sent) }
}

#[cfg(test)]
mod tests {
    use adit_common::{Addr, Direct, HostPort};

    use super::*;

    fn end(kind: DirectKind, last: u32, acked: u64, received: u64, half_closed_received: u64) -> DirectEnd {
        let none = Addr::default();
        DirectEnd {
            direct: Direct {
                client: none,
                server: none,
                dialled: none,
                netns: 1,
                opened: 0,
                cgroup: 0,
                half_closed_received,
                command: [0; _],
                pid: 0,
                client_port: HostPort(1),
                server_port: HostPort(2),
                dialled_port: HostPort(2),
                kind: kind as u16,
                state: last,
                closed: 0,
                acked,
                received,
                srtt: 0,
                retransmits: 0,
            },
            cookie: 1,
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_applications() {
        let (out, inward) = (DirectKind::Outbound, DirectKind::Inbound);
        for (end, expected) in [
            // Sent 10, received 20; both have closed, this end first.
            (end(out, state::FIN_WAIT2, 12, 21, 20), (10, 20)),
            // This end gave up its socket before the other's FIN.
            (end(out, state::FIN_WAIT2, 12, 20, 20), (10, 20)),
            (end(out, state::LAST_ACK, 12, 21, 0), (10, 20)),
            (end(out, state::CLOSING, 12, 21, 0), (10, 20)),
            // Reset.
            (end(out, 1, 11, 20, 0), (10, 20)),
            (end(out, state::CLOSE_WAIT, 11, 21, 0), (10, 20)),
            (end(out, state::SYN_SENT, 0, 0, 0), (0, 0)),
            // Seen at the server.
            (end(inward, state::LAST_ACK, 21, 11, 0), (10, 20)),
            (end(inward, state::FIN_WAIT2, 21, 11, 10), (10, 20)),
        ] {
            assert_eq!(bytes(&end), expected, "state {}", end.direct.state);
        }
    }

    #[test]
    fn the_last_state_tells_who_closed_and_how() {
        let to = Some("10.0.0.1:80".parse().unwrap());
        for (last, reporter, party, phase, how) in [
            (state::FIN_WAIT2, Reporter::Source, Party::Source, Phase::Relay, "fin"),
            (
                state::FIN_WAIT2,
                Reporter::Destination,
                Party::Destination,
                Phase::Relay,
                "fin",
            ),
            (
                state::LAST_ACK,
                Reporter::Source,
                Party::Destination,
                Phase::Relay,
                "fin",
            ),
            (
                state::LAST_ACK,
                Reporter::Destination,
                Party::Source,
                Phase::Relay,
                "fin",
            ),
            (
                state::FIN_WAIT1,
                Reporter::Source,
                Party::Destination,
                Phase::Relay,
                "reset",
            ),
            (1, Reporter::Source, Party::Unknown, Phase::Relay, "reset"),
            (state::GONE, Reporter::Source, Party::Unknown, Phase::Relay, "error"),
            (
                state::SYN_SENT,
                Reporter::Source,
                Party::Unknown,
                Phase::Connect,
                "refused",
            ),
        ] {
            let (by, at, ended) = outcome(last, reporter, to);
            assert_eq!((by, at, ended.as_str()), (party, phase, how), "{last}");
        }
    }
}
