//! Addresses and ports as the maps hold them.

/// An IPv4 or IPv6 address in one form: sixteen bytes in network order, IPv4 as `::ffff:a.b.c.d`.
///
/// The words are in network byte order, as the kernel's contexts hold them, so that no program swaps them.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Addr {
    /// The four words of the address, each in network byte order.
    pub words: [u32; 4],
}

impl Addr {
    const MAPPED: u32 = 0xffff_u32.to_be();

    /// An IPv4 address from its word in network order.
    #[inline(always)]
    pub const fn v4(word: u32) -> Self {
        Self {
            words: [0, 0, Self::MAPPED, word],
        }
    }

    /// An IPv6 address from its words in network order; IPv4-mapped ones are IPv4 from here on.
    #[inline(always)]
    pub const fn v6(words: [u32; 4]) -> Self {
        Self { words }
    }

    /// Whether this is IPv4.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        self.words[0] == 0 && self.words[1] == 0 && self.words[2] == Self::MAPPED
    }

    /// The IPv4 word in network order; meaningful if [`Addr::is_v4`].
    #[inline(always)]
    pub const fn v4_word(&self) -> u32 {
        self.words[3]
    }

    /// `0.0.0.0`, `::` or `::ffff:0.0.0.0`, which connect to the host itself.
    #[inline(always)]
    pub const fn is_unspecified(&self) -> bool {
        self.words[3] == 0 && (self.is_v4() || (self.words[0] == 0 && self.words[1] == 0 && self.words[2] == 0))
    }

    /// `127.0.0.0/8`, `::1`, or the mapped form of the former.
    #[inline(always)]
    pub const fn is_loopback(&self) -> bool {
        if self.is_v4() {
            return u32::from_be(self.words[3]) >> 24 == 127;
        }
        self.words[0] == 0 && self.words[1] == 0 && self.words[2] == 0 && self.words[3] == 1_u32.to_be()
    }

    /// Whether the two are the same address.
    #[inline(always)]
    pub const fn same(&self, other: &Self) -> bool {
        self.words[0] == other.words[0]
            && self.words[1] == other.words[1]
            && self.words[2] == other.words[2]
            && self.words[3] == other.words[3]
    }

    /// Whether this is no address at all: the value of a family that a pod lacks.
    #[inline(always)]
    pub const fn is_none(&self) -> bool {
        self.words[0] == 0 && self.words[1] == 0 && self.words[2] == 0 && self.words[3] == 0
    }

    /// The sixteen bytes in network order.
    pub const fn octets(&self) -> [u8; 16] {
        let [a, b, c, d] = self.words;
        let (a, b, c, d) = (a.to_ne_bytes(), b.to_ne_bytes(), c.to_ne_bytes(), d.to_ne_bytes());
        [
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
        ]
    }
}

impl From<core::net::IpAddr> for Addr {
    fn from(ip: core::net::IpAddr) -> Self {
        let octets = match ip {
            core::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            core::net::IpAddr::V6(v6) => v6.octets(),
        };
        let word = |i: usize| u32::from_ne_bytes([octets[i], octets[i + 1], octets[i + 2], octets[i + 3]]);
        Self {
            words: [word(0), word(4), word(8), word(12)],
        }
    }
}

impl From<Addr> for core::net::IpAddr {
    fn from(addr: Addr) -> Self {
        core::net::Ipv6Addr::from(addr.octets()).to_canonical()
    }
}

/// A port in host byte order. A type of its own, because the contexts give some in network order.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct HostPort(pub u16);

impl HostPort {
    /// From a 16-bit field in network order, as `bpf_sock_addr.user_port` holds it in its lower half.
    #[inline(always)]
    pub const fn from_be16(port: u16) -> Self {
        Self(u16::from_be(port))
    }

    /// The 16-bit field in network order.
    #[inline(always)]
    pub const fn to_be16(self) -> u16 {
        self.0.to_be()
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::net::IpAddr;

    use super::*;

    fn addr(text: &str) -> Addr {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn addresses_come_back_as_they_went_in() {
        for text in [
            "10.1.2.3",
            "0.0.0.0",
            "255.255.255.255",
            "::1",
            "fd00::1:2",
            "2001:db8::ffff:a00:1",
        ] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Addr::from(ip)), ip);
        }
        assert_eq!(
            addr("::ffff:10.1.2.3"),
            addr("10.1.2.3"),
            "the mapped form is the same address"
        );
        assert_eq!(Addr::v4(u32::from_ne_bytes([10, 1, 2, 3])), addr("10.1.2.3"));
    }

    #[test]
    fn loopback_and_unspecified_are_told_in_every_form() {
        for (text, loopback, unspecified) in [
            ("127.0.0.1", true, false),
            ("127.255.255.254", true, false),
            ("128.0.0.1", false, false),
            ("::1", true, false),
            ("::2", false, false),
            ("::ffff:127.0.0.1", true, false),
            ("0.0.0.0", false, true),
            ("::", false, true),
            ("::ffff:0.0.0.0", false, true),
            ("fe80::", false, false),
            ("10.0.0.0", false, false),
        ] {
            let addr = addr(text);
            assert_eq!(
                (addr.is_loopback(), addr.is_unspecified()),
                (loopback, unspecified),
                "{text}"
            );
        }
    }
}
