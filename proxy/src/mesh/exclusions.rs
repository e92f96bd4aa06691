//! What of a pod's traffic its author wants left alone, and how that is written.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use adit_common::HBONE_PORT;
use ipnet::IpNet;
use serde::{Serialize, Serializer};
use thiserror::Error;

/// What the names of annotations begin with that exclude something.
const EXCLUDE: &str = "mesh.adit/exclude-";
/// The most blocks that one list may come to: the kernel looks each up by its prefix.
pub const MAX_BLOCKS: usize = 64;
/// How much of a bad text is repeated.
const QUOTED: usize = 48;

/// What of a pod's traffic is left alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Exclusions {
    /// The ports at which whatever comes goes straight to the application.
    pub inbound_ports: Vec<PortRange>,
    /// The ports that the pod dials by itself.
    pub outbound_ports: Vec<PortRange>,
    /// The addresses that the pod dials by itself.
    pub outbound_cidrs: Vec<IpNet>,
}

/// Ports from the first to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortRange {
    first: u16,
    last: u16,
}

/// Why a text excludes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ExclusionError {
    /// No port, and no range of ports.
    #[error("{0:?} is neither a port from 1 to 65535 nor a range of ports; write them like 9090 or 8000-8010")]
    Port(String),
    /// No range of addresses.
    #[error("{0:?} is no range of addresses; write it like 10.0.0.0/8 or fd00::/8")]
    Cidr(String),
    /// A range of addresses that begins within itself.
    #[error("{text:?} has bits set beyond its prefix; write {net} for all of it, or {address} for the address alone")]
    HostBits {
        /// As it is written.
        text: String,
        /// The whole range.
        net: IpNet,
        /// The address as a range.
        address: IpNet,
    },
    /// A range of IPv4 addresses in their IPv6 form, by which nothing is matched.
    #[error("{0:?} is IPv4 in the form of IPv6; write it as IPv4")]
    Mapped(String),
    /// The port of tunnels.
    #[error("port {} is where tunnels come in, and cannot be excluded; leave it out", HBONE_PORT.0)]
    TunnelPort,
    /// More than the kernel is told.
    #[error("it comes to {0} blocks, and {MAX_BLOCKS} are the most; write fewer or wider ranges")]
    TooMany(usize),
}

/// What is wrong with an annotation.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AnnotationError {
    /// Its value is none.
    #[error("annotation {name}: {error}. Nothing is excluded by it")]
    Value {
        /// The annotation.
        name: &'static str,
        /// What is wrong.
        error: ExclusionError,
    },
    /// There is no such annotation.
    #[error("annotation {0:?} is not known, and excludes nothing; there are {names}", names = NAMES.join(", "))]
    Unknown(String),
}

const INBOUND_PORTS: &str = "mesh.adit/exclude-inbound-ports";
const OUTBOUND_PORTS: &str = "mesh.adit/exclude-outbound-ports";
const OUTBOUND_CIDRS: &str = "mesh.adit/exclude-outbound-cidrs";
const NAMES: [&str; 3] = [INBOUND_PORTS, OUTBOUND_PORTS, OUTBOUND_CIDRS];

impl Exclusions {
    /// Takes account of an annotation, whichever it is. One that is not as it should be excludes nothing at all: the part
    /// of it that can be read may be what nobody meant.
    pub fn annotated(&mut self, name: &str, value: &str) -> Result<(), AnnotationError> {
        if !name.starts_with(EXCLUDE) {
            return Ok(());
        }
        let failed = |name| move |error| AnnotationError::Value { name, error };
        match name {
            INBOUND_PORTS => {
                self.inbound_ports = ports(value).and_then(inbound_ports).map_err(failed(INBOUND_PORTS))?
            }
            OUTBOUND_PORTS => {
                self.outbound_ports = ports(value).and_then(outbound_ports).map_err(failed(OUTBOUND_PORTS))?
            }
            OUTBOUND_CIDRS => {
                let nets = items(value).map(cidr).collect::<Result<_, _>>();
                self.outbound_cidrs = nets.and_then(outbound_cidrs).map_err(failed(OUTBOUND_CIDRS))?;
            }
            _ => return Err(AnnotationError::Unknown(quoted(name))),
        }
        Ok(())
    }

    /// Whether nothing is excluded.
    pub fn is_empty(&self) -> bool {
        self.inbound_ports.is_empty() && !self.has_outbound()
    }

    /// Whether anything that the pod dials is excluded.
    pub fn has_outbound(&self) -> bool {
        !self.outbound_ports.is_empty() || !self.outbound_cidrs.is_empty()
    }
}

/// Those of a list in their order, each once. Fails where all together cannot be.
pub(super) fn inbound_ports(ranges: Vec<PortRange>) -> Result<Vec<PortRange>, ExclusionError> {
    let ranges = outbound_ports(ranges)?;
    match ranges.iter().any(|range| range.contains(HBONE_PORT.0)) {
        true => Err(ExclusionError::TunnelPort),
        false => Ok(ranges),
    }
}

/// The same of ports that are dialled.
pub(super) fn outbound_ports(mut ranges: Vec<PortRange>) -> Result<Vec<PortRange>, ExclusionError> {
    ranges.sort_unstable();
    let mut merged: Vec<PortRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(before) if u32::from(range.first) <= u32::from(before.last) + 1 => {
                before.last = before.last.max(range.last);
            }
            _ => merged.push(range),
        }
    }
    let blocks = merged.iter().map(|range| range.blocks().count()).sum();
    match blocks <= MAX_BLOCKS {
        true => Ok(merged),
        false => Err(ExclusionError::TooMany(blocks)),
    }
}

/// The same of ranges of addresses.
pub(super) fn outbound_cidrs(mut nets: Vec<IpNet>) -> Result<Vec<IpNet>, ExclusionError> {
    nets.sort_unstable();
    nets.dedup();
    match nets.len() <= MAX_BLOCKS {
        true => Ok(nets),
        false => Err(ExclusionError::TooMany(nets.len())),
    }
}

/// A range of addresses, or one address.
pub(super) fn cidr(text: &str) -> Result<IpNet, ExclusionError> {
    let net = match text.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => text.parse().map_err(|_| ExclusionError::Cidr(quoted(text)))?,
    };
    if let IpNet::V6(v6) = net
        && v6.prefix_len() >= 96
        && v6.addr().to_ipv4_mapped().is_some()
    {
        return Err(ExclusionError::Mapped(quoted(text)));
    }
    if net.addr() != net.network() {
        return Err(ExclusionError::HostBits {
            text: quoted(text),
            net: net.trunc(),
            address: net.addr().into(),
        });
    }
    Ok(net)
}

/// The items of an annotation. One that is empty, or nothing but space, has none.
fn items(value: &str) -> impl Iterator<Item = &str> {
    let value = Some(value).filter(|value| !value.trim().is_empty());
    value.into_iter().flat_map(|value| value.split(',')).map(str::trim)
}

fn ports(value: &str) -> Result<Vec<PortRange>, ExclusionError> {
    items(value).map(str::parse).collect()
}

fn quoted(text: &str) -> String {
    text[..text.floor_char_boundary(QUOTED)].to_owned()
}

impl PortRange {
    /// Whether the port is one of them.
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// Those that are in both.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let (first, last) = (self.first.max(other.first), self.last.min(other.last));
        (first <= last).then_some(Self { first, last })
    }

    /// All of them.
    pub fn ports(&self) -> std::ops::RangeInclusive<u16> {
        self.first..=self.last
    }

    /// The fewest blocks that they consist of: by the first port of each, and how many of its bits all of the block's
    /// ports have in common.
    pub fn blocks(&self) -> impl Iterator<Item = (u16, u32)> {
        let (mut next, end) = (u32::from(self.first), u32::from(self.last) + 1);
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let aligned = next.trailing_zeros().min(16);
            let size = aligned.min((end - next).ilog2());
            let first = next as u16;
            next += 1 << size;
            Some((first, 16 - size))
        })
    }
}

impl FromStr for PortRange {
    type Err = ExclusionError;

    fn from_str(text: &str) -> Result<Self, ExclusionError> {
        // Digits alone: numbers may have a sign otherwise.
        let port = |text: &str| {
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u16>().ok().filter(|port| digits && *port > 0)
        };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (port(first), port(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Self { first, last }),
            _ => Err(ExclusionError::Port(quoted(text))),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the annotation excludes, in words, or what is wrong with it.
    fn annotated(name: &str, value: &str) -> Result<String, String> {
        let mut exclusions = Exclusions::default();
        exclusions.annotated(name, value).map_err(|error| {
            assert!(exclusions.is_empty(), "{name} {value}");
            error.to_string()
        })?;
        let Exclusions {
            inbound_ports,
            outbound_ports,
            outbound_cidrs,
        } = &exclusions;
        let words = |ranges: &[PortRange]| ranges.iter().map(ToString::to_string).collect::<Vec<_>>();
        let nets = outbound_cidrs.iter().map(ToString::to_string);
        let lists = [words(inbound_ports), words(outbound_ports), nets.collect()];
        Ok(lists.map(|list| list.join(",")).join("|"))
    }

    #[test]
    fn what_is_written_well_is_excluded_and_nothing_besides() {
        for (name, value, excluded) in [
            (INBOUND_PORTS, "9090", "9090||"),
            (INBOUND_PORTS, " 9090 , 8000-8010,8005", "8000-8010,9090||"),
            (INBOUND_PORTS, "1-15007,15009-65535", "1-15007,15009-65535||"),
            (INBOUND_PORTS, "80,81,83", "80-81,83||"),
            (OUTBOUND_PORTS, "15008,65535", "|15008,65535|"),
            (OUTBOUND_PORTS, "1-65535", "|1-65535|"),
            (OUTBOUND_PORTS, "65535,65534", "|65534-65535|"),
            (OUTBOUND_CIDRS, "10.0.0.0/8,fd00::/8", "||10.0.0.0/8,fd00::/8"),
            (OUTBOUND_CIDRS, "10.1.2.3, 10.1.2.3/32", "||10.1.2.3/32"),
            (OUTBOUND_CIDRS, "0.0.0.0/0,::/0", "||0.0.0.0/0,::/0"),
            (INBOUND_PORTS, "", "||"),
            (OUTBOUND_CIDRS, "  ", "||"),
            ("mesh.adit/mode", "nonsense", "||"),
            ("other/exclude-inbound-ports", "9090", "||"),
        ] {
            assert_eq!(annotated(name, value), Ok(excluded.to_owned()), "{name} {value}");
        }
    }

    #[test]
    fn of_what_is_written_badly_nothing_is_excluded_and_the_reason_says_what_to_write() {
        let many: Vec<String> = (1..=65).map(|number| (2 * number).to_string()).collect();
        let many = many.join(",");
        for (name, value, reason) in [
            (INBOUND_PORTS, "0", "like 9090 or 8000-8010"),
            (INBOUND_PORTS, "65536", "like 9090 or 8000-8010"),
            (INBOUND_PORTS, "9090,", "\"\" is neither a port"),
            (INBOUND_PORTS, "9090,http", "\"http\" is neither a port"),
            (INBOUND_PORTS, "*", "\"*\" is neither a port"),
            (INBOUND_PORTS, "9090 9091", "\"9090 9091\" is neither a port"),
            (INBOUND_PORTS, "8010-8000", "\"8010-8000\" is neither a port"),
            (INBOUND_PORTS, "+80", "\"+80\" is neither a port"),
            (INBOUND_PORTS, "8000-", "\"8000-\" is neither a port"),
            (INBOUND_PORTS, "8000--8010", "is neither a port"),
            (INBOUND_PORTS, "-80", "is neither a port"),
            (INBOUND_PORTS, "15008", "port 15008 is where tunnels come in"),
            (INBOUND_PORTS, "1-65535", "port 15008 is where tunnels come in"),
            (OUTBOUND_PORTS, &many, "it comes to 65 blocks, and 64 are the most"),
            (OUTBOUND_CIDRS, "10.0.0.0/33", "like 10.0.0.0/8 or fd00::/8"),
            (OUTBOUND_CIDRS, "10.0.0.0/8;fd00::/8", "is no range of addresses"),
            (OUTBOUND_CIDRS, "example.org", "is no range of addresses"),
            (
                OUTBOUND_CIDRS,
                "10.1.2.3/8",
                "write 10.0.0.0/8 for all of it, or 10.1.2.3/32",
            ),
            (
                OUTBOUND_CIDRS,
                "fd00::1/64",
                "write fd00::/64 for all of it, or fd00::1/128",
            ),
            (OUTBOUND_CIDRS, "::ffff:10.0.0.0/104", "write it as IPv4"),
            (OUTBOUND_CIDRS, "::ffff:10.0.0.1", "write it as IPv4"),
            (
                "mesh.adit/exclude-inbound-port",
                "80",
                "there are mesh.adit/exclude-inbound-ports",
            ),
            ("mesh.adit/exclude-inbound-cidrs", "::/0", "is not known"),
        ] {
            let error = annotated(name, value).unwrap_err();
            assert!(
                error.contains(reason) && error.contains(name),
                "{name} {value}: {error}"
            );
        }
        let long = "x".repeat(100_000);
        assert!(annotated(OUTBOUND_CIDRS, &long).unwrap_err().len() < 300);
    }

    #[test]
    fn a_bad_annotation_takes_nothing_from_the_others() {
        let mut exclusions = Exclusions::default();
        exclusions.annotated(INBOUND_PORTS, "9090").unwrap();
        exclusions.annotated(OUTBOUND_PORTS, "9090,x").unwrap_err();
        exclusions.annotated(OUTBOUND_CIDRS, "10.0.0.0/8").unwrap();
        let outbound = (exclusions.outbound_ports.len(), exclusions.outbound_cidrs.len());
        assert_eq!((exclusions.inbound_ports.len(), outbound), (1, (0, 1)));
    }

    #[test]
    fn two_ranges_have_in_common_what_is_in_both() {
        let range = |text: &str| text.parse::<PortRange>().unwrap();
        for (a, b, both) in [
            ("80", "80", Some("80")),
            ("80", "81", None),
            ("8000-8010", "8005-8020", Some("8005-8010")),
            ("1-65535", "15008", Some("15008")),
            ("1-10", "11-20", None),
        ] {
            assert_eq!(range(a).and(&range(b)), both.map(range), "{a} {b}");
            assert_eq!(range(b).and(&range(a)), both.map(range), "{b} {a}");
        }
    }

    #[test]
    fn blocks_are_the_ports_of_the_range_each_once() {
        for (text, count) in [
            ("1-65535", 16),
            ("9090", 1),
            ("8000-8010", 3),
            ("1-65534", 30),
            ("32768-65535", 1),
            ("65535", 1),
        ] {
            let range: PortRange = text.parse().unwrap();
            let blocks: Vec<_> = range.blocks().collect();
            assert_eq!(blocks.len(), count, "{text}: {blocks:?}");
            let ports = blocks.into_iter().flat_map(|(first, bits)| {
                let first = u32::from(first);
                first..first + (1 << (16 - bits))
            });
            assert!(ports.eq(range.ports().map(u32::from)), "{text}");
        }
    }
}
