//! What becomes of connects in network namespaces that nobody has looked at yet.

use crate::Addr;

/// The most namespaces that are known not to be in the mesh; far above what a node has.
pub const MAX_OTHERS: u32 = 65_536;
/// The bytes of the ring that tells of connects in namespaces that nobody has looked at: some 400 of them. Those beyond
/// are told of when they try again.
pub const STRANGERS_LEN: u32 = 1 << 14;

/// What becomes of a connect by a process below the pods' cgroup in a namespace that is not classified.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Startup {
    /// It passes: the proxy has not looked at what was there before it yet.
    #[default]
    Off = 0,
    /// It passes, and is counted.
    Permissive = 1,
    /// It is refused.
    Enforced = 2,
}

impl Startup {
    /// From a map's value.
    #[inline(always)]
    pub const fn from_u32(value: u32) -> Self {
        match value {
            1 => Self::Permissive,
            2 => Self::Enforced,
            _ => Self::Off,
        }
    }
}

/// What becomes of a connect outside the enrolled pods' namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartupVerdict {
    /// Left alone.
    Pass,
    /// Left alone and counted; the proxy is to look at the namespace.
    PassUnclassified,
    /// Refused with `EPERM` and counted; the proxy is to look at the namespace.
    Refuse,
}

/// Decides on a TCP connect below the pods' cgroup, in a namespace that is no enrolled pod's. `is_other` tells whether
/// the namespace is known not to be in the mesh.
#[inline(always)]
pub fn not_enrolled(startup: Startup, destination: &Addr, is_other: impl FnOnce() -> bool) -> StartupVerdict {
    if matches!(startup, Startup::Off) || destination.is_loopback() || destination.is_unspecified() || is_other() {
        return StartupVerdict::Pass;
    }
    match startup {
        Startup::Enforced => StartupVerdict::Refuse,
        Startup::Off | Startup::Permissive => StartupVerdict::PassUnclassified,
    }
}

/// A connect in a namespace that nobody has looked at yet.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stranger {
    /// The cookie of the network namespace.
    pub netns: u64,
    /// The cgroup of the process that dialled.
    pub cgroup: u64,
    /// The process that dialled, in the initial PID namespace.
    pub pid: u32,
    /// Whether it was refused: a [`Startup`].
    pub startup: u32,
}

const _: () = assert!(size_of::<Stranger>() == 24);

#[cfg(feature = "user")]
#[expect(
    unsafe_code,
    reason = "a promise about layout that only the owner of the type can make"
)]
mod pod {
    // SAFETY: `repr(C)`, `Copy`, without padding (its size is the sum of its fields', as asserted above), and every bit
    // pattern is a valid value.
    unsafe impl aya::Pod for super::Stranger {}
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::net::IpAddr;

    use super::*;

    #[test]
    fn what_leaves_an_unknown_namespace_is_refused_where_that_is_enforced() {
        use StartupVerdict::{Pass, PassUnclassified, Refuse};
        for (startup, destination, other, verdict) in [
            (Startup::Enforced, "10.0.0.9", false, Refuse),
            (Startup::Enforced, "fd00::9", false, Refuse),
            (Startup::Enforced, "10.0.0.9", true, Pass),
            (Startup::Enforced, "127.0.0.1", false, Pass),
            (Startup::Enforced, "::1", false, Pass),
            (Startup::Enforced, "0.0.0.0", false, Pass),
            (Startup::Permissive, "10.0.0.9", false, PassUnclassified),
            (Startup::Permissive, "10.0.0.9", true, Pass),
            (Startup::Permissive, "127.0.0.1", false, Pass),
            (Startup::Off, "10.0.0.9", false, Pass),
        ] {
            let addr: IpAddr = destination.parse().unwrap();
            assert_eq!(
                not_enrolled(startup, &addr.into(), || other),
                verdict,
                "{startup:?} {destination} {other}"
            );
        }
        assert_eq!(Startup::from_u32(9), Startup::Off);
    }
}
