//! Names, folders and addresses of a cluster. All follow from its prefix, so that nobody need remember them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::ensure;

/// Where the states of all clusters lie: a file system that holds containers' own, so not a temporary one in memory.
pub(super) const STATES: &str = "/var/lib/adit-cluster";

/// The control plane's API server, from every machine of the cluster.
pub const API_SERVER: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);

/// The range of services' addresses.
pub const SERVICE_RANGES: &str = "10.96.0.0/16,fd00:96::/112";

/// The ranges of all pods' addresses.
pub const POD_RANGES: &str = "10.244.0.0/16,fd00:244::/48";

/// How many nodes a cluster has.
pub const NODES: u8 = 2;

/// Which cluster: a few lower-case letters and digits. Clusters of different prefixes have nothing in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix(String);

impl FromStr for Prefix {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let good = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        // The first a letter: a number there is the process id of an owner of another kind of bed.
        let begins = text.starts_with(|letter: char| letter.is_ascii_lowercase());
        ensure!(
            begins && text.len() <= 16 && text.chars().all(good),
            "{text:?} cannot be a cluster's prefix: at most 16 lower-case letters and digits, a letter first"
        );
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// What a cluster is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// etcd, the API server, the controllers and the scheduler.
    ControlPlane,
    /// A node, counted from 1.
    Node(u8),
}

impl Machine {
    /// All machines of a cluster.
    pub fn all() -> impl Iterator<Item = Machine> {
        std::iter::once(Machine::ControlPlane).chain(Machine::nodes())
    }

    /// The nodes of a cluster.
    pub fn nodes() -> impl Iterator<Item = Machine> {
        (1..=NODES).map(Machine::Node)
    }

    /// Its address in the machines' network.
    pub fn v4(self) -> Ipv4Addr {
        match self {
            Machine::ControlPlane => API_SERVER,
            Machine::Node(number) => Ipv4Addr::new(10, 90, 0, 10 + number),
        }
    }

    /// Its IPv6 address in the machines' network.
    pub fn v6(self) -> Ipv6Addr {
        let last = match self {
            Machine::ControlPlane => 1,
            Machine::Node(number) => 0x10 + u16::from(number),
        };
        Ipv6Addr::new(0xfd00, 0x90, 0, 0, 0, 0, 0, last)
    }

    /// The ranges of its pods' addresses.
    pub(super) fn pod_ranges(self) -> [String; 2] {
        let number = match self {
            Machine::ControlPlane => 0,
            Machine::Node(number) => number,
        };
        [format!("10.244.{number}.0/24"), format!("fd00:244:0:{number:x}::/64")]
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Machine::ControlPlane => formatter.write_str("cp"),
            Machine::Node(number) => write!(formatter, "n{number}"),
        }
    }
}

impl FromStr for Machine {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let found = Machine::all().find(|machine| machine.to_string() == text);
        found.ok_or_else(|| anyhow::anyhow!("there is no machine {text:?} in a cluster: cp, n1, n2 are"))
    }
}

impl Prefix {
    /// What the names of namespaces and cgroups of this cluster begin with.
    pub(super) fn names(&self) -> String {
        format!("adit-{self}-")
    }

    /// The name of a machine's network namespace and cgroup.
    pub(super) fn name(&self, machine: Machine) -> String {
        format!("{}{machine}", self.names())
    }

    /// The network namespace of a machine.
    pub fn netns(&self, machine: Machine) -> PathBuf {
        crate::bed::netns::path(&self.name(machine))
    }

    /// Where everything that the cluster keeps is.
    pub fn state(&self) -> PathBuf {
        Path::new(STATES).join(&self.0)
    }

    /// Where what a machine keeps is.
    pub fn folder(&self, machine: Machine) -> PathBuf {
        self.state().join(machine.to_string())
    }

    /// A certificate, key or root, or a kubeconfig.
    pub(super) fn pki(&self, file: &str) -> PathBuf {
        self.state().join("pki").join(file)
    }

    /// The administrator's kubeconfig. It works in the cluster's network namespaces only.
    pub fn kubeconfig(&self) -> PathBuf {
        self.pki("admin.kubeconfig")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_short_word() {
        assert_eq!("be".parse::<Prefix>().unwrap().name(Machine::Node(1)), "adit-be-n1");
        for bad in ["", "1", "1a", "a-b", "A", "a/..", "abcdefghijklmnopq"] {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn machines_are_read_as_they_are_written() {
        for machine in Machine::all() {
            assert_eq!(machine.to_string().parse::<Machine>().unwrap(), machine);
        }
        assert!("n9".parse::<Machine>().is_err());
    }
}
