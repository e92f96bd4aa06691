//! What the kernel decides by itself: verdicts found by destination, and the connections that go direct.

use crate::{Addr, COMMAND_LEN, HostPort};

// Elements of these maps are made as they are needed, but not their tables: 16 bytes for each that there may be.

/// The most verdicts that the kernel holds; what has no place is asked.
pub const MAX_VERDICTS: u32 = 1 << 18;
/// The most destinations of which something is known.
pub const MAX_DESTINATIONS: u32 = 1 << 17;
/// The most ranges of addresses.
pub const MAX_RANGES: u32 = 4096;
/// The most direct connections that are open and recorded at once.
pub const MAX_DIRECT: u32 = 1 << 19;
/// The bytes of the ring that tells the ends of direct connections: some 1,600 of them. The proxy has it mapped twice.
pub const EVENTS_LEN: u32 = 1 << 18;
/// The bytes of the ring that tells refusals: some 400 of them.
pub const REFUSALS_LEN: u32 = 1 << 16;
/// How many refusals of one kind are told of one pod within [`REFUSALS_PERIOD`]; what is above is only counted.
pub const REFUSALS_TOLD: u32 = 100;
/// In nanoseconds, as a power of two: a little over a second.
pub const REFUSALS_PERIOD: u32 = 30;
/// The source number of a peer without an identity.
pub const NOBODY: u32 = 0;
/// The port that stands for every port without a verdict of its own.
pub const ANY_PORT: u16 = 0;

/// What stands for a verdict that is not there: an `Option` would become branches that the verifier cannot follow.
pub const NO_VERDICT: u32 = u32::MAX;

/// A decision as the maps hold it.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Cached {
    /// The proxy decides.
    #[default]
    Ask = 0,
    /// Permitted.
    Allow = 1,
    /// Refused.
    Deny = 2,
    /// The verdicts by source and port say.
    Table = 3,
    /// A service's virtual address: what is known of the endpoint that is chosen says.
    Service = 4,
    /// Left alone: the destination excludes the port.
    Excluded = 5,
}

impl Cached {
    /// From a map's value; what is not known is asked.
    #[inline(always)]
    pub const fn from_u32(value: u32) -> Self {
        match value {
            1 => Self::Allow,
            2 => Self::Deny,
            3 => Self::Table,
            4 => Self::Service,
            5 => Self::Excluded,
            _ => Self::Ask,
        }
    }
}

/// What is known of an address.
///
/// The kernel may give the place of an element that is replaced or removed to another at once, under the eyes of a
/// program that has found it. So the key comes first in the value, where it is written first, and is read last: where
/// it is not what was looked for, nothing that was read counts.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Destination {
    /// The address.
    pub addr: Addr,
    /// The namespace cookie of the enrolled pod of this node that has the address; zero for any other address.
    pub netns: u64,
    /// The pod's slot.
    pub slot: u32,
    /// A [`Cached`].
    pub verdict: u32,
}

/// A verdict's key.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct VerdictKey {
    /// The number of the source's identity, or [`NOBODY`].
    pub source: u32,
    /// The slot of the destination.
    pub slot: u32,
    /// The destination's port, or [`ANY_PORT`].
    pub port: u32,
}

/// A verdict, with its key first as in [`Destination`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// What it is on.
    pub key: VerdictKey,
    /// A [`Cached`].
    pub verdict: u32,
}

/// A range of addresses: the key of a longest-prefix match.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Range {
    /// How many bits of the address count; those of IPv4 begin at 96.
    pub prefix_len: u32,
    /// The address.
    pub addr: Addr,
}

/// What is known of a connection from `source` to `port` of a destination. `lookup` finds verdicts, or
/// [`NO_VERDICT`].
#[inline(always)]
pub fn cached(source: u32, destination: &Destination, port: HostPort, lookup: impl Fn(&VerdictKey) -> u32) -> Cached {
    match Cached::from_u32(destination.verdict) {
        Cached::Table => {
            let key = |port| VerdictKey {
                source,
                slot: destination.slot,
                port,
            };
            let mut found = lookup(&key(port.0.into()));
            if found == NO_VERDICT {
                found = lookup(&key(ANY_PORT.into()));
            }
            match Cached::from_u32(found) {
                Cached::Table | Cached::Service => Cached::Ask,
                verdict => verdict,
            }
        }
        verdict => verdict,
    }
}

/// Which way a connection that the kernel let through itself goes, by the end that is seen of it.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirectKind {
    /// From an enrolled pod, seen there.
    Outbound = 1,
    /// From a peer without identity into an enrolled pod, seen there.
    Inbound = 2,
    /// A probe by the node's kubelet into an enrolled pod, seen there.
    Probe = 3,
}

/// An open direct connection, by its socket's cookie.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Direct {
    /// The address of the side that connects.
    pub client: Addr,
    /// The address of the side that accepts; none where a service led nowhere.
    pub server: Addr,
    /// The address that the client dialled: the server's, or a service's.
    pub dialled: Addr,
    /// The namespace cookie of the enrolled pod at whose end this is seen.
    pub netns: u64,
    /// When it began, on the monotonic clock, in nanoseconds.
    pub opened: u64,
    /// The cgroup of the process that dialled, where it is of this node.
    pub cgroup: u64,
    /// How many bytes had been received when this end had closed and the other had not.
    pub half_closed_received: u64,
    /// The command name of the process that dialled.
    pub command: [u8; COMMAND_LEN],
    /// The process that dialled, in the initial PID namespace.
    pub pid: u32,
    /// The port of the side that connects.
    pub client_port: HostPort,
    /// The port of the side that accepts.
    pub server_port: HostPort,
    /// The port that the client dialled.
    pub dialled_port: HostPort,
    /// A [`DirectKind`].
    pub kind: u16,
    /// The socket's state before it closed, as the kernel numbers them; zero while it is open, and for a refusal.
    pub state: u32,
    /// When it ended, on the monotonic clock, in nanoseconds; this and what follows is zero until then.
    pub closed: u64,
    /// What the kernel counts as acknowledged of what this end sent: its SYN and FIN count as a byte each.
    pub acked: u64,
    /// What the kernel counts as received by this end: the FIN counts as a byte.
    pub received: u64,
    /// The smoothed round-trip time, in eighths of a microsecond.
    pub srtt: u32,
    /// How many segments this end sent again.
    pub retransmits: u32,
}

/// The end of a direct connection, or a refusal by the kernel, as it is told.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectEnd {
    /// The connection.
    pub direct: Direct,
    /// The socket's cookie; zero for a refusal.
    pub cookie: u64,
}

/// How much of a pod's refusals has been told.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RefusalShare {
    /// The period in which the last one was told: the monotonic clock, by [`REFUSALS_PERIOD`].
    pub period: u64,
    /// How many were told in that period.
    pub told: u64,
    /// How many were not told, ever.
    pub untold: u64,
}

impl RefusalShare {
    /// What becomes of the share with one more refusal at `now`, on the monotonic clock, and whether it is to be told.
    #[inline(always)]
    pub const fn one_more(self, now: u64) -> (Self, bool) {
        let period = now >> REFUSALS_PERIOD;
        let told = if period == self.period { self.told } else { 0 };
        let tell = told < REFUSALS_TOLD as u64;
        let share = Self {
            period,
            told: told + tell as u64,
            untold: self.untold + !tell as u64,
        };
        (share, tell)
    }
}

/// Whose share a refusal counts on.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusalKind {
    /// The pod's own connects.
    Connect = 0,
    /// What strangers send to the pod.
    Syn = 1,
}

/// The place of a pod's share, given its slot.
#[inline(always)]
pub const fn refusal_index(slot: u32, kind: RefusalKind) -> u32 {
    slot * 2 + kind as u32
}

/// What the kernel counts, by index of the map of counters.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counter {
    /// Ends of connections that found the ring full, and wait in the map of direct connections.
    LateEnds = 0,
    /// Refusals that were not told: their pod's share was used up, or the ring was full.
    UntoldRefusals = 1,
    /// Connections that found no room in the map of flows.
    FlowsFull = 2,
    /// Direct connections that could not be recorded, for want of memory.
    Unrecorded = 3,
    /// Connects that were refused in namespaces that nobody had looked at yet.
    StartupRefused = 4,
    /// Connects that passed there.
    StartupPassed = 5,
}

/// How many counters there are.
pub const COUNTERS: u32 = 6;

const _: () = {
    assert!(size_of::<Destination>() == 32);
    assert!(size_of::<Verdict>() == 16);
    assert!(size_of::<VerdictKey>() == 12);
    assert!(size_of::<Range>() == 20);
    assert!(size_of::<Direct>() == 144);
    assert!(size_of::<DirectEnd>() == 152);
    assert!(size_of::<RefusalShare>() == 24);
};

#[cfg(feature = "user")]
#[expect(
    unsafe_code,
    reason = "a promise about layout that only the owner of the types can make"
)]
mod pod {
    // SAFETY: each type is `repr(C)`, `Copy`, without padding (its size is the sum of its fields', as asserted above),
    // and every bit pattern is a valid value.
    unsafe impl aya::Pod for super::Destination {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::VerdictKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Verdict {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Range {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Direct {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::DirectEnd {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::RefusalShare {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_of_the_port_goes_before_that_of_any_port() {
        let table = Destination {
            netns: 1,
            slot: 3,
            verdict: Cached::Table as u32,
            ..Destination::default()
        };
        let lookup = |key: &VerdictKey| match (key.source, key.slot, key.port) {
            (7, 3, 80) => Cached::Deny as u32,
            (7, 3, 0) => Cached::Allow as u32,
            (8, 3, 80) => Cached::Allow as u32,
            (9, 3, 0) => 99,
            _ => NO_VERDICT,
        };
        for (source, port, verdict) in [
            (7, 80, Cached::Deny),
            (7, 81, Cached::Allow),
            (8, 80, Cached::Allow),
            (8, 81, Cached::Ask),
            (9, 1, Cached::Ask),
            (NOBODY, 80, Cached::Ask),
        ] {
            assert_eq!(
                cached(source, &table, HostPort(port), lookup),
                verdict,
                "{source} {port}"
            );
        }
    }

    #[test]
    fn a_pod_is_told_of_so_many_refusals_in_each_period() {
        let mut share = RefusalShare::default();
        for period in [3_u64, 4, 9] {
            let told = (0..1000_u64).filter(|at| {
                let (next, tell) = share.one_more((period << REFUSALS_PERIOD) + at);
                share = next;
                tell
            });
            assert_eq!(told.count(), REFUSALS_TOLD as usize, "{period}");
        }
        assert_eq!(share.untold, 3 * (1000 - u64::from(REFUSALS_TOLD)));
    }

    #[test]
    fn a_destination_that_answers_all_alike_needs_no_table() {
        for verdict in [Cached::Ask, Cached::Allow, Cached::Deny, Cached::Service] {
            let destination = Destination {
                verdict: verdict as u32,
                ..Destination::default()
            };
            assert_eq!(cached(1, &destination, HostPort(80), |_| unreachable!()), verdict);
        }
    }
}
