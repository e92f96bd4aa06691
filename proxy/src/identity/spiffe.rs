//! SPIFFE identities as Istio's meshes write them: `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

const SCHEME: &str = "spiffe://";

/// The longest SPIFFE id accepted, in bytes (SPIFFE-ID 2.3).
pub const MAX_ID_LEN: usize = 2048;
/// The longest trust domain accepted, in bytes (SPIFFE-ID 2.1: that of a host name).
pub const MAX_TRUST_DOMAIN_LEN: usize = 255;

/// Why a string is not an identity of this mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SpiffeError {
    /// The string does not begin with `spiffe://`.
    #[error("a SPIFFE id begins with spiffe://")]
    Scheme,
    /// The id or trust domain is longer than the standard allows.
    #[error("longer than SPIFFE allows")]
    TooLong,
    /// The trust domain is empty or has characters other than `a-z 0-9 . - _`.
    #[error("a trust domain has one or more of the characters a-z 0-9 . - _")]
    TrustDomain,
    /// The path is not exactly `/ns/<namespace>/sa/<service account>`.
    #[error("the path of an identity is /ns/<namespace>/sa/<service account>")]
    Path,
    /// A path segment is empty, `.`, `..`, or has characters other than `a-z A-Z 0-9 . - _`.
    #[error("a path segment has one or more of the characters a-z A-Z 0-9 . - _ and is not . or ..")]
    Segment,
}

/// The name of a trust domain: the root of a set of identities that one authority vouches for.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrustDomain(Arc<str>);

impl TrustDomain {
    /// Parses a trust domain's name.
    pub fn parse(name: &str) -> Result<Self, SpiffeError> {
        check_trust_domain(name)?;
        Ok(Self(name.into()))
    }

    /// The name, without scheme.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TrustDomain {
    type Err = SpiffeError;

    fn from_str(name: &str) -> Result<Self, SpiffeError> {
        Self::parse(name)
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A workload identity, as a certificate's URI SAN carries it. Clones share one string.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpiffeId {
    uri: Arc<str>,
    namespace: (u32, u32),
    service_account: u32,
}

impl SpiffeId {
    /// Builds the identity of a service account.
    pub fn new(trust_domain: &TrustDomain, namespace: &str, service_account: &str) -> Result<Self, SpiffeError> {
        Self::parse(&format!("{SCHEME}{trust_domain}/ns/{namespace}/sa/{service_account}"))
    }

    /// Parses the full URI form.
    pub fn parse(uri: &str) -> Result<Self, SpiffeError> {
        if uri.len() > MAX_ID_LEN {
            return Err(SpiffeError::TooLong);
        }
        let rest = uri.strip_prefix(SCHEME).ok_or(SpiffeError::Scheme)?;
        let (trust_domain, path) = rest.split_once('/').ok_or(SpiffeError::Path)?;
        check_trust_domain(trust_domain)?;
        let mut segments = path.split('/');
        let (Some("ns"), Some(namespace), Some("sa"), Some(service_account), None) = (
            segments.next(),
            segments.next(),
            segments.next(),
            segments.next(),
            segments.next(),
        ) else {
            return Err(SpiffeError::Path);
        };
        check_segment(namespace)?;
        check_segment(service_account)?;
        // The lengths fit: the whole is at most MAX_ID_LEN.
        let namespace_start = (SCHEME.len() + trust_domain.len() + "/ns/".len()) as u32;
        let namespace_end = namespace_start + namespace.len() as u32;
        Ok(Self {
            uri: uri.into(),
            namespace: (namespace_start, namespace_end),
            service_account: namespace_end + "/sa/".len() as u32,
        })
    }

    /// The whole URI.
    pub fn as_str(&self) -> &str {
        &self.uri
    }

    /// The trust domain's name.
    pub fn trust_domain(&self) -> &str {
        &self.uri[SCHEME.len()..self.namespace_range().start - "/ns/".len()]
    }

    /// The Kubernetes namespace.
    pub fn namespace(&self) -> &str {
        &self.uri[self.namespace_range()]
    }

    /// The Kubernetes service account.
    pub fn service_account(&self) -> &str {
        &self.uri[self.service_account as usize..]
    }

    /// The form that policies compare: the URI without its scheme.
    pub fn principal(&self) -> &str {
        &self.uri[SCHEME.len()..]
    }

    fn namespace_range(&self) -> Range<usize> {
        self.namespace.0 as usize..self.namespace.1 as usize
    }
}

impl FromStr for SpiffeId {
    type Err = SpiffeError;

    fn from_str(uri: &str) -> Result<Self, SpiffeError> {
        Self::parse(uri)
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.uri)
    }
}

impl fmt::Debug for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for SpiffeId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.uri)
    }
}

fn check_trust_domain(name: &str) -> Result<(), SpiffeError> {
    if name.len() > MAX_TRUST_DOMAIN_LEN {
        return Err(SpiffeError::TooLong);
    }
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
    if name.is_empty() || !name.bytes().all(ok) {
        return Err(SpiffeError::TrustDomain);
    }
    Ok(())
}

fn check_segment(segment: &str) -> Result<(), SpiffeError> {
    let ok = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if segment.is_empty() || matches!(segment, "." | "..") || !segment.bytes().all(ok) {
        return Err(SpiffeError::Segment);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_gives_back_its_parts() {
        let id = SpiffeId::parse("spiffe://cluster.local/ns/shop/sa/cart").unwrap();
        assert_eq!(
            (id.trust_domain(), id.namespace(), id.service_account(), id.principal()),
            ("cluster.local", "shop", "cart", "cluster.local/ns/shop/sa/cart")
        );
        let domain = TrustDomain::parse("cluster.local").unwrap();
        assert_eq!(SpiffeId::new(&domain, "shop", "cart").unwrap(), id);
    }

    #[test]
    fn malformed_identities_are_refused_with_the_reason() {
        let long = format!("spiffe://a/ns/b/sa/{}", "c".repeat(MAX_ID_LEN));
        for (text, reason) in [
            ("", SpiffeError::Scheme),
            ("http://a/ns/b/sa/c", SpiffeError::Scheme),
            ("SPIFFE://a/ns/b/sa/c", SpiffeError::Scheme),
            ("spiffe://", SpiffeError::Path),
            ("spiffe://a", SpiffeError::Path),
            ("spiffe:///ns/b/sa/c", SpiffeError::TrustDomain),
            ("spiffe://A/ns/b/sa/c", SpiffeError::TrustDomain),
            ("spiffe://a:80/ns/b/sa/c", SpiffeError::TrustDomain),
            ("spiffe://u@a/ns/b/sa/c", SpiffeError::TrustDomain),
            ("spiffe://a/ns/b/sa", SpiffeError::Path),
            ("spiffe://a/ns/b/sa/c/d", SpiffeError::Path),
            ("spiffe://a/ns/b/sa/c/", SpiffeError::Path),
            ("spiffe://a/sa/c/ns/b", SpiffeError::Path),
            ("spiffe://a/ns//sa/c", SpiffeError::Segment),
            ("spiffe://a/ns/../sa/c", SpiffeError::Segment),
            ("spiffe://a/ns/b/sa/c%2f", SpiffeError::Segment),
            ("spiffe://a/ns/b/sa/c?x", SpiffeError::Segment),
            ("spiffe://a/ns/b/sa/c#x", SpiffeError::Segment),
            ("spiffe://a/ns/b/sa/ü", SpiffeError::Segment),
            (long.as_str(), SpiffeError::TooLong),
        ] {
            assert_eq!(SpiffeId::parse(text), Err(reason), "{text}");
        }
    }
}
