//! The authority of a CONNECT request: the address that the tunnel leads to.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use thiserror::Error;

/// The longest authority read, in bytes; a longer one is no address.
const MAX_LEN: usize = 64;

/// Why an authority is not the address of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AuthorityError {
    /// It is absent.
    #[error("the request has no authority")]
    Missing,
    /// It is longer than any address.
    #[error("the authority is longer than an address")]
    TooLong,
    /// It does not consist of an IP address, a colon and a port.
    #[error("the authority is not an IP address and a port; IPv6 addresses stand in brackets")]
    Malformed,
    /// Its port is zero.
    #[error("the authority's port is 0")]
    PortZero,
}

/// An address and port that a tunnel's client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Authority(SocketAddr);

impl Authority {
    /// Parses `a.b.c.d:port` or `[v6]:port`. An IPv4-mapped IPv6 address is IPv4.
    pub fn parse(text: &str) -> Result<Self, AuthorityError> {
        if text.is_empty() {
            return Err(AuthorityError::Missing);
        }
        if text.len() > MAX_LEN {
            return Err(AuthorityError::TooLong);
        }
        let (host, port) = text.rsplit_once(':').ok_or(AuthorityError::Malformed)?;
        let ip = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(v6) => IpAddr::V6(v6.parse::<Ipv6Addr>().map_err(|_| AuthorityError::Malformed)?).to_canonical(),
            None => IpAddr::V4(host.parse().map_err(|_| AuthorityError::Malformed)?),
        };
        // The standard parser would take a sign or leading zeros, by which one port had many names.
        let plain =
            !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) && (port == "0" || !port.starts_with('0'));
        let port = port.parse().ok().filter(|_| plain).ok_or(AuthorityError::Malformed)?;
        if port == 0 {
            return Err(AuthorityError::PortZero);
        }
        Ok(Self(SocketAddr::new(ip, port)))
    }

    /// The address and port.
    pub fn addr(self) -> SocketAddr {
        self.0
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_read() {
        for (text, addr) in [
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("[fd00::1]:65535", "[fd00::1]:65535"),
            ("[::ffff:10.0.0.1]:80", "10.0.0.1:80"),
        ] {
            assert_eq!(Authority::parse(text).unwrap().addr(), addr.parse().unwrap(), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_the_reason() {
        let long = format!("[{}1]:80", "0".repeat(70));
        for (text, reason) in [
            ("", AuthorityError::Missing),
            (&long, AuthorityError::TooLong),
            ("10.0.0.1", AuthorityError::Malformed),
            ("10.0.0.1:", AuthorityError::Malformed),
            (":80", AuthorityError::Malformed),
            ("fd00::1:80", AuthorityError::Malformed),
            ("[fd00::1]", AuthorityError::Malformed),
            ("[fd00::1%eth0]:80", AuthorityError::Malformed),
            ("[10.0.0.1]:80", AuthorityError::Malformed),
            ("10.0.0.1:080", AuthorityError::Malformed),
            ("10.0.0.1:+80", AuthorityError::Malformed),
            ("10.0.0.1:65536", AuthorityError::Malformed),
            ("10.0.0.1:0", AuthorityError::PortZero),
            ("010.0.0.1:80", AuthorityError::Malformed),
            ("user@10.0.0.1:80", AuthorityError::Malformed),
            ("example.com:80", AuthorityError::Malformed),
            ("10.0.0.1:80/x", AuthorityError::Malformed),
            (" 10.0.0.1:80", AuthorityError::Malformed),
        ] {
            assert_eq!(Authority::parse(text), Err(reason), "{text:?}");
        }
    }
}
