//! TCP made by hand, packet by packet, as a pod with CAP_NET_RAW may: no socket of the kernel's ever connects.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use socket2::{Domain, Protocol, Socket, Type};

use super::Ending;
use crate::bed::wait_for;
use crate::sys::send_frame;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PUSH: u8 = 8;
const ACK: u8 = 16;

/// By what a handmade packet leaves.
#[derive(Debug, Clone, Copy)]
pub enum Wire {
    /// A raw IP socket (`IPPROTO_RAW`).
    Raw,
    /// A packet socket on `eth0`; the next hop on the way is named.
    Packet(Ipv4Addr),
}

/// The client's end of a handmade connection. The kernel must be kept from resetting what it does not know.
#[derive(Debug)]
pub struct Handmade {
    wire: Wire,
    hardware: [u8; 6],
    raw: Socket,
    from: SocketAddrV4,
    to: SocketAddrV4,
    next: u32,
    expected: u32,
}

impl Handmade {
    /// From a port of the pod's, about which the kernel says nothing as long as this process' rules stand.
    pub fn new(wire: Wire, from: SocketAddrV4, to: SocketAddrV4) -> anyhow::Result<Self> {
        let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP)).context("make a raw socket")?;
        raw.set_header_included_v4(true)?;
        let hardware = match wire {
            Wire::Raw => [0; 6],
            Wire::Packet(next_hop) => hardware_address(next_hop)?,
        };
        Ok(Self {
            wire,
            hardware,
            raw,
            from,
            to,
            next: 1_000_000,
            expected: 0,
        })
    }

    /// Shakes hands; an error if nobody answers or the answer is no.
    pub fn shake_hands(&mut self, patience: Duration) -> anyhow::Result<()> {
        self.send(SYN, b"")?;
        self.next += 1;
        let answer = self.receive(patience)?.context("no answer to the SYN")?;
        if answer.flags & (SYN | ACK) != SYN | ACK {
            bail!("the answer to the SYN has the flags {:#x}", answer.flags);
        }
        self.expected = answer.sequence.wrapping_add(1);
        self.send(ACK, b"")
    }

    /// Sends text, ends this side, and reads to the end.
    pub fn ask(&mut self, text: &str, patience: Duration) -> anyhow::Result<(String, Ending)> {
        self.send(PUSH | ACK, text.as_bytes())?;
        self.next = self.next.wrapping_add(u32::try_from(text.len())?);
        self.send(FIN | ACK, b"")?;
        self.next = self.next.wrapping_add(1);
        let mut heard = Vec::new();
        loop {
            let Some(packet) = self.receive(patience)? else {
                return Ok((String::from_utf8_lossy(&heard).into_owned(), Ending::Stuck));
            };
            let ending = match packet.flags {
                flags if flags & RST != 0 => Some(Ending::RESET),
                flags if flags & FIN != 0 => Some(Ending::Fin),
                _ => None,
            };
            if packet.sequence == self.expected {
                let fin = u32::from(ending == Some(Ending::Fin));
                self.expected = self.expected.wrapping_add(u32::try_from(packet.payload.len())? + fin);
                heard.extend(packet.payload);
                self.send(ACK, b"")?;
            }
            if let Some(ending) = ending {
                return Ok((String::from_utf8_lossy(&heard).into_owned(), ending));
            }
        }
    }

    fn send(&self, flags: u8, payload: &[u8]) -> anyhow::Result<()> {
        let (source, destination) = (*self.from.ip(), *self.to.ip());
        let ports = (self.from.port(), self.to.port());
        let segment = segment(
            (source.into(), destination.into()),
            ports,
            (self.next, self.expected),
            flags,
            payload,
        );
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, libc::IPPROTO_TCP as u8, 0, 0];
        packet[2..4].copy_from_slice(&u16::try_from(20 + segment.len())?.to_be_bytes());
        packet.extend(source.octets());
        packet.extend(destination.octets());
        let sum = checksum(&packet);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(segment);
        match self.wire {
            Wire::Raw => self.raw.send_to(&packet, &SocketAddr::from(self.to).into()).map(drop),
            Wire::Packet(_) => send_frame(&packet, "eth0", self.hardware),
        }
        .context("send a handmade packet")
    }

    /// The next packet of this connection, if one comes in time.
    fn receive(&self, patience: Duration) -> anyhow::Result<Option<Packet>> {
        let end = Instant::now() + patience;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.raw.set_read_timeout(Some(left))?;
            match (&self.raw).read(&mut buffer) {
                Ok(length) => {
                    if let Some(packet) = self.parse(&buffer[..length]) {
                        return Ok(Some(packet));
                    }
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                Err(error) => return Err(error).context("receive on a raw socket"),
            }
        }
    }

    fn parse(&self, packet: &[u8]) -> Option<Packet> {
        let tcp = packet.get(usize::from(packet.first()? & 15) * 4..)?;
        let word = |at: usize| Some(u16::from_be_bytes([*tcp.get(at)?, *tcp.get(at + 1)?]));
        let ours =
            packet.get(12..16)? == self.to.ip().octets() && (word(0)?, word(2)?) == (self.to.port(), self.from.port());
        ours.then_some(Packet {
            sequence: u32::from_be_bytes(tcp.get(4..8)?.try_into().ok()?),
            flags: *tcp.get(13)?,
            payload: tcp.get(usize::from(tcp.get(12)? >> 4) * 4..)?.to_vec(),
        })
    }
}

struct Packet {
    sequence: u32,
    flags: u8,
    payload: Vec<u8>,
}

/// Sends a SYN that carries data already, over IPv6 and under any source address.
pub fn syn_with_data(from: SocketAddrV6, to: SocketAddrV6, data: &[u8]) -> anyhow::Result<()> {
    // For this protocol the header is the caller's.
    let raw = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
    let ends = (IpAddr::V6(*from.ip()), IpAddr::V6(*to.ip()));
    let segment = segment(ends, (from.port(), to.port()), (1_000_000, 0), SYN, data);
    let mut packet = vec![0x60, 0, 0, 0, 0, 0, libc::IPPROTO_TCP as u8, 64];
    packet[4..6].copy_from_slice(&u16::try_from(segment.len())?.to_be_bytes());
    packet.extend(from.ip().octets());
    packet.extend(to.ip().octets());
    packet.extend(segment);
    let to = SocketAddrV6::new(*to.ip(), 0, 0, 0);
    raw.send_to(&packet, &SocketAddr::from(to).into())
        .context("send a handmade packet")?;
    Ok(())
}

/// A TCP segment with its checksum.
fn segment(
    (source, destination): (IpAddr, IpAddr),
    ports: (u16, u16),
    (sequence, acknowledged): (u32, u32),
    flags: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut segment = Vec::with_capacity(20 + payload.len());
    segment.extend(ports.0.to_be_bytes());
    segment.extend(ports.1.to_be_bytes());
    segment.extend(sequence.to_be_bytes());
    segment.extend(acknowledged.to_be_bytes());
    segment.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(payload);
    let mut summed = Vec::new();
    for address in [source, destination] {
        match address {
            IpAddr::V4(address) => summed.extend(address.octets()),
            IpAddr::V6(address) => summed.extend(address.octets()),
        }
    }
    summed.extend((segment.len() as u32).to_be_bytes());
    summed.extend((libc::IPPROTO_TCP as u32).to_be_bytes());
    summed.extend(&segment);
    let sum = checksum(&summed);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment
}

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |byte| u32::from(*byte)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The hardware address of a neighbour, which is asked for it.
fn hardware_address(of: Ipv4Addr) -> anyhow::Result<[u8; 6]> {
    let any = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    any.send_to(b"who are you?", (of, 9))?;
    let mut found = None;
    wait_for("a neighbour's hardware address", Duration::from_secs(2), || {
        let table = std::fs::read_to_string("/proc/thread-self/net/arp")?;
        found = table.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            (fields.first() == Some(&of.to_string().as_str()) && fields.get(2) == Some(&"0x2"))
                .then(|| parse_hardware(fields[3]))
                .flatten()
        });
        Ok(found.is_some())
    })?;
    found.context("the address that was just there")
}

fn parse_hardware(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()
        .ok()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn the_checksum_of_a_segment_with_its_checksum_is_zero() {
        let ends = (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        let segment = segment(ends, (1, 2), (3, 4), SYN, b"odd");
        let mut summed = [Ipv6Addr::LOCALHOST.octets(), Ipv6Addr::LOCALHOST.octets()].concat();
        summed.extend([0, 0, 0, segment.len() as u8, 0, 0, 0, 6]);
        summed.extend(segment);
        assert_eq!(checksum(&summed), 0);
    }

    #[test]
    fn a_hardware_address_is_read() {
        assert_eq!(parse_hardware("0a:00:ff:10:20:30"), Some([10, 0, 255, 16, 32, 48]));
        assert_eq!(parse_hardware("0a:00"), None);
    }
}
