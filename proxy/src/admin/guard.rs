//! Keeps web pages out: a browser on this host would send their requests here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Lets a request through that a program of this host has sent to this host by a name nobody else controls.
pub(super) async fn only_this_host(request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    match check(request.headers(), authority) {
        Ok(()) => next.run(request).await,
        Err(reason) => (StatusCode::FORBIDDEN, reason).into_response(),
    }
}

fn check(headers: &HeaderMap, authority: Option<&str>) -> Result<(), &'static str> {
    const NOT_LOOPBACK: &str = "the Host of a request must be localhost or a loopback address\n";
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        // HTTP/1.0, which no browser speaks.
        (None, _) => {}
        (Some(host), None) if host.to_str().is_ok_and(is_loopback) => {}
        _ => return Err(NOT_LOOPBACK),
    }
    if !authority.is_none_or(is_loopback) {
        return Err(NOT_LOOPBACK);
    }
    // Browsers say whence a request comes where that matters; programs do not.
    let foreign = headers
        .get("sec-fetch-site")
        .is_some_and(|site| site != "none" && site != "same-origin");
    if headers.contains_key(header::ORIGIN) || foreign {
        return Err("requests of web pages are refused\n");
    }
    Ok(())
}

/// Whether a Host is `localhost` or a loopback address, with or without a port. Another name may lead here by DNS
/// rebinding.
fn is_loopback(host: &str) -> bool {
    let name = if let Some(rest) = host.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else {
            return false;
        };
        if !port.is_empty() && !port.strip_prefix(':').is_some_and(is_port) {
            return false;
        }
        return address
            .parse()
            .is_ok_and(|address: Ipv6Addr| IpAddr::from(address).to_canonical().is_loopback());
    } else if let Some((name, port)) = host.rsplit_once(':') {
        if !is_port(port) {
            return false;
        }
        name
    } else {
        host
    };
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
}

fn is_port(text: &str) -> bool {
    text.parse::<u16>().is_ok() && text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_names_pass() {
        for host in [
            "localhost",
            "LOCALHOST:15000",
            "127.0.0.1",
            "127.0.0.1:15000",
            "127.9.9.9:1",
            "[::1]",
            "[::1]:1",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:15000",
            "localhost.evil.example",
            "localhost:x",
            "localhost:+1",
            "localhost:1:1",
            "127.0.0.1.evil.example",
            "10.0.0.1:15000",
            "0.0.0.0",
            "[::]",
            "[::1",
            "[::1]x",
            "[fd00::1]:1",
            "::1",
            "user@localhost",
            "2130706433",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
