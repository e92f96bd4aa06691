//! The `forwarded` header (RFC 7239), by which a tunnel's client tells the address that its application has.

use std::net::SocketAddr;

/// The longest header read, in bytes.
const MAX_LEN: usize = 256;

/// The header's value for a client.
pub fn forwarded_for(client: SocketAddr) -> String {
    format!("for=\"{client}\"")
}

/// The client's address in a header's value; none where it has none that this mesh's proxies would write.
pub fn parse_forwarded(value: &str) -> Option<SocketAddr> {
    if value.len() > MAX_LEN {
        return None;
    }
    value.split(';').find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        if !name.eq_ignore_ascii_case("for") {
            return None;
        }
        let value = value
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'))
            .unwrap_or(value);
        let addr: SocketAddr = value.parse().ok()?;
        Some(SocketAddr::new(addr.ip().to_canonical(), addr.port()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_comes_back_as_it_went_in() {
        for text in ["10.0.0.1:4000", "[fd00::1]:4000"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(parse_forwarded(&forwarded_for(addr)), Some(addr));
        }
        assert_eq!(
            parse_forwarded("host=a.b;For=\"10.0.0.1:1\""),
            Some("10.0.0.1:1".parse().unwrap())
        );
        assert_eq!(
            parse_forwarded("for=10.0.0.1:1;host=x"),
            Some("10.0.0.1:1".parse().unwrap())
        );
    }

    #[test]
    fn what_is_no_address_is_none() {
        let long = format!("for=\"{}\"", "1".repeat(400));
        for text in [
            "",
            "for",
            "for=",
            "for=\"\"",
            "for=unknown",
            "for=\"10.0.0.1\"",
            "by=\"10.0.0.1:1\"",
            &long,
        ] {
            assert_eq!(parse_forwarded(text), None, "{text:?}");
        }
    }
}
