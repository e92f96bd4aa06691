//! Certificate chains as a CA answers them and as a peer presents them: taken apart, bounded and verified.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use thiserror::Error;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate, X509Error};

use super::key::KeyError;
use super::trust::Root;
use super::{SpiffeError, SpiffeId, TrustDomain};

/// The longest chain accepted, leaf and intermediates.
pub const MAX_CHAIN_CERTS: usize = 8;
/// The most bytes of certificates accepted from a peer or in a CA's answer.
pub const MAX_CHAIN_BYTES: usize = 64 * 1024;
/// The longest piece of a certificate's text that is repeated in a reason.
const MAX_SAID_CHARS: usize = 256;
/// The most roots accepted in a CA's answer.
pub(super) const MAX_ROOTS: usize = 32;

/// Why a certificate or its chain is not acceptable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CertificateError {
    /// There is no certificate at all.
    #[error("no certificate")]
    Empty,
    /// More certificates than [`MAX_CHAIN_CERTS`], or an absurd number of roots.
    #[error("a chain of {0} certificates is too long")]
    TooMany(usize),
    /// More bytes than [`MAX_CHAIN_BYTES`].
    #[error("a chain of {0} bytes is too large")]
    TooLarge(usize),
    /// An element of the CA's answer is not PEM, or holds no certificate.
    #[error("element {element} of the chain is not a PEM certificate: {reason}")]
    NotPem {
        /// Its index in the answer.
        element: usize,
        /// What the decoder said.
        reason: String,
    },
    /// A certificate is not X.509.
    #[error("not an X.509 certificate: {0}")]
    Unparsable(String),
    /// The answer has no self-signed certificate at its end.
    #[error("the chain does not end in a root (a self-signed certificate)")]
    NoRoot,
    /// The leaf has no URI name, hence no SPIFFE identity.
    #[error("the certificate has no URI name, hence no identity")]
    NoIdentity,
    /// The leaf has more than one URI name, which SPIFFE forbids.
    #[error("the certificate has {0} URI names; an identity is exactly one")]
    SeveralIdentities(usize),
    /// The leaf's URI name is not an identity.
    #[error("the certificate's URI name {uri:?} is not an identity: {reason}")]
    BadIdentity {
        /// The name as found.
        uri: String,
        /// Why it does not parse.
        reason: SpiffeError,
    },
    /// The leaf belongs to somebody else.
    #[error("the certificate is {found}'s, not {expected}'s")]
    WrongIdentity {
        /// Who it should be.
        expected: SpiffeId,
        /// Who it is.
        found: SpiffeId,
    },
    /// The peer is of another trust domain.
    #[error("{found} is not of the trust domain {expected}, of an alias of it, or of one that is federated with it")]
    WrongTrustDomain {
        /// Our own trust domain.
        expected: TrustDomain,
        /// Who the peer is.
        found: SpiffeId,
    },
    /// The leaf's public key is not the one that was asked to be certified.
    #[error("the certificate is for another key than the request's")]
    WrongKey,
    /// A certificate of the chain has expired.
    #[error("the certificate or one of its issuers has expired")]
    Expired,
    /// A certificate of the chain is not valid yet; likely a clock is wrong.
    #[error("the certificate or one of its issuers is not valid yet; compare the clocks of this node and the CA")]
    NotYetValid,
    /// The certificate may not be used for TLS in the role needed.
    #[error("the certificate's extended key usage does not allow TLS in this role")]
    Purpose,
    /// No root that is trusted for the identity's domain has signed the chain.
    #[error(
        "the chain does not lead to a root that is trusted for {domain} (its last certificate was issued by \"{issuer}\")"
    )]
    UnknownIssuer {
        /// The trust domain of the certificate's identity.
        domain: String,
        /// The issuer that the chain's last certificate names.
        issuer: String,
    },
    /// A key or a signature of the chain is too weak to prove anything.
    #[error("{0}")]
    Weak(String),
    /// A certificate that is to sign others may not.
    #[error("{0:?} is not an authority's certificate (its basic constraints do not say CA:TRUE)")]
    NotAnAuthority(String),
    /// An authority's certificate in the place of a leaf.
    #[error("the certificate is an authority's own (its basic constraints say CA:TRUE), not a workload's")]
    AuthorityAsLeaf,
    /// A leaf in the place of an authority's certificate.
    #[error("a certificate of the chain was signed by one that is not an authority's")]
    LeafAsAuthority,
    /// An issuer may not issue for such names.
    #[error("the name constraints of an issuer do not allow this identity")]
    NameConstraints,
    /// An issuer may not have so many others below it.
    #[error("an issuer of the chain allows fewer authorities below it (its path length constraint)")]
    PathLength,
    /// The operator has named the root, an issuer or the certificate itself as compromised.
    #[error("the chain rests on a certificate or key that the operator has named as distrusted")]
    Distrusted,
    /// The issuer has revoked a certificate of the chain.
    #[error("the certificate with the serial number {serial} is revoked")]
    Revoked {
        /// Its serial number, lower-case hexadecimal.
        serial: String,
    },
    /// Whether it is revoked is not known, and has to be.
    #[error("no revocation list speaks of the certificate with the serial number {serial}, and the policy is strict")]
    RevocationUnknown {
        /// Its serial number, lower-case hexadecimal.
        serial: String,
    },
    /// The list that would say whether it is revoked is out of date, and may not be.
    #[error(
        "the revocation list that speaks of the certificate with the serial number {serial} is out of date, and the \
         policy is strict"
    )]
    RevocationExpired {
        /// Its serial number, lower-case hexadecimal.
        serial: String,
    },
    /// The chain does not verify for another reason.
    #[error("the chain does not verify: {0}")]
    Untrusted(String),
    /// The private key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A CA's answer taken apart.
pub(super) struct Chain {
    /// What is presented to peers: leaf, then intermediates.
    pub(super) presented: Vec<CertificateDer<'static>>,
    /// What peers are verified against.
    pub(super) roots: Vec<Root>,
}

impl Chain {
    /// Takes a CA's answer apart, in either layout found in the wild: the roots together in the last
    /// string, or every certificate in a string of its own.
    pub(super) fn parse(answer: &[String]) -> Result<Self, CertificateError> {
        let bytes = answer.iter().map(String::len).sum();
        if bytes > MAX_CHAIN_BYTES {
            return Err(CertificateError::TooLarge(bytes));
        }
        if answer.len() > MAX_CHAIN_CERTS + MAX_ROOTS {
            return Err(CertificateError::TooMany(answer.len()));
        }
        let mut elements = Vec::with_capacity(answer.len());
        for (element, text) in answer.iter().enumerate() {
            let certificates = CertificateDer::pem_slice_iter(text.as_bytes())
                .collect::<Result<Vec<_>, _>>()
                .map_err(|e| CertificateError::NotPem {
                    element,
                    reason: e.to_string(),
                })?;
            if certificates.is_empty() {
                return Err(CertificateError::NotPem {
                    element,
                    reason: "no CERTIFICATE block".into(),
                });
            }
            elements.push(certificates);
        }
        // In the first layout the last string is the bundle of roots. A cross-signed certificate in it is
        // a help for building paths, not an anchor: only what signs itself is trusted for its own sake.
        let bundle = if elements.len() > 1 {
            elements.pop().unwrap_or_default()
        } else {
            Vec::new()
        };
        let (mut roots, helpers): (Vec<_>, Vec<_>) = bundle.into_iter().partition(is_self_signed);
        let mut presented: Vec<_> = elements.into_iter().flatten().collect();
        // In the second layout the strings before it may be roots too.
        while presented.len() > 1 && presented.last().is_some_and(is_self_signed) {
            roots.extend(presented.pop());
        }
        presented.extend(helpers);
        Self::of(presented, &roots)
    }

    /// Of what is presented to peers, and of the roots that it is to lead to.
    pub(super) fn of(
        presented: Vec<CertificateDer<'static>>,
        roots: &[CertificateDer<'_>],
    ) -> Result<Self, CertificateError> {
        let (leaf, rest) = presented.split_first().ok_or(CertificateError::Empty)?;
        check_bounds(leaf, rest)?;
        let roots = usable_roots(roots)?;
        Ok(Self { presented, roots })
    }
}

/// A CA's roots, without those that are too weak to count, if there are others.
pub(super) fn usable_roots(roots: &[CertificateDer<'_>]) -> Result<Vec<Root>, CertificateError> {
    if roots.len() > MAX_ROOTS {
        return Err(CertificateError::TooMany(roots.len()));
    }
    let mut weak = None;
    let mut usable = Vec::with_capacity(roots.len());
    for root in roots {
        match Root::parse(root) {
            Ok(root) => usable.push(root),
            Err(error @ CertificateError::Weak(_)) => weak = Some(error),
            Err(error) => return Err(error),
        }
    }
    if usable.is_empty() {
        return Err(weak.unwrap_or(CertificateError::NoRoot));
    }
    Ok(usable)
}

/// Takes certificates apart that stand one after the other, in DER.
pub(super) fn split_der(mut bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let (rest, _) = X509Certificate::from_der(bytes).map_err(|e| CertificateError::Unparsable(e.to_string()))?;
        let (one, rest) = bytes.split_at(bytes.len() - rest.len());
        all.push(CertificateDer::from(one.to_vec()));
        bytes = rest;
    }
    Ok(all)
}

/// What a leaf certificate says.
pub(super) struct Leaf {
    pub(super) id: SpiffeId,
    /// Lower-case hexadecimal.
    pub(super) serial: String,
    pub(super) issuer: String,
    pub(super) public_key: Vec<u8>,
}

impl Leaf {
    pub(super) fn parse(der: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let certificate = parse(der)?;
        Ok(Self {
            id: identity(&certificate)?,
            serial: hex(certificate.raw_serial()),
            issuer: cut(&certificate.issuer().to_string()),
            public_key: certificate.public_key().raw.to_vec(),
        })
    }
}

/// The name of the root that a chain leads to, as its last certificate says; empty where that cannot be read.
pub(super) fn last_issuer(leaf: &CertificateDer<'_>, rest: &[CertificateDer<'_>]) -> String {
    let last = rest.last().unwrap_or(leaf);
    parse(last).map_or_else(|_| String::new(), |certificate| cut(&certificate.issuer().to_string()))
}

/// As much as is repeated of what a peer says of itself.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(MAX_SAID_CHARS).collect()
}

/// Refuses a peer's chain that is too long or large to be worth verifying.
pub(super) fn check_bounds(leaf: &CertificateDer<'_>, rest: &[CertificateDer<'_>]) -> Result<(), CertificateError> {
    if rest.len() >= MAX_CHAIN_CERTS {
        return Err(CertificateError::TooMany(rest.len() + 1));
    }
    let bytes = leaf.len() + rest.iter().map(|certificate| certificate.len()).sum::<usize>();
    if bytes > MAX_CHAIN_BYTES {
        return Err(CertificateError::TooLarge(bytes));
    }
    Ok(())
}

/// When all certificates of a chain are valid: from the latest start to the earliest end.
pub(super) fn validity(presented: &[CertificateDer<'_>]) -> Result<(SystemTime, SystemTime), CertificateError> {
    let mut span: Option<(i64, i64)> = None;
    for der in presented {
        let certificate = parse(der)?;
        let (from, to) = (
            certificate.validity().not_before.timestamp(),
            certificate.validity().not_after.timestamp(),
        );
        span = Some(span.map_or((from, to), |(start, end)| (start.max(from), end.min(to))));
    }
    let (start, end) = span.ok_or(CertificateError::Empty)?;
    Ok((system_time(start), system_time(end)))
}

pub(super) fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, CertificateError> {
    let (rest, certificate) =
        X509Certificate::from_der(der).map_err(|e| CertificateError::Unparsable(e.to_string()))?;
    if !rest.is_empty() {
        return Err(CertificateError::Unparsable("bytes after its end".into()));
    }
    Ok(certificate)
}

pub(super) fn identity(certificate: &X509Certificate<'_>) -> Result<SpiffeId, CertificateError> {
    let names = certificate
        .subject_alternative_name()
        .map_err(|e| CertificateError::Unparsable(format!("subject alternative name: {e}")))?
        .map(|extension| extension.value.general_names.as_slice())
        .unwrap_or_default();
    let mut uris = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let uri = uris.next().ok_or(CertificateError::NoIdentity)?;
    let more = uris.count();
    if more > 0 {
        return Err(CertificateError::SeveralIdentities(more + 1));
    }
    SpiffeId::parse(uri).map_err(|reason| CertificateError::BadIdentity { uri: cut(uri), reason })
}

fn is_self_signed(der: &CertificateDer<'static>) -> bool {
    parse(der).is_ok_and(|certificate| {
        // One that another authority of the same name has signed is none.
        let forged = || {
            matches!(
                certificate.verify_signature(None),
                Err(X509Error::SignatureVerificationError)
            )
        };
        certificate.subject().as_raw() == certificate.issuer().as_raw() && !forged()
    })
}

pub(super) fn system_time(seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds.max(0).unsigned_abs())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{TestCa, id};

    fn parsed(answer: &[String]) -> Result<(usize, usize), CertificateError> {
        Chain::parse(answer).map(|chain| (chain.presented.len(), chain.roots.len()))
    }

    fn peer_identity(chain: &[CertificateDer<'_>]) -> Result<SpiffeId, CertificateError> {
        identity(&parse(chain.first().ok_or(CertificateError::Empty)?)?)
    }

    #[test]
    fn both_chain_layouts_give_the_same_leaf_intermediates_and_roots() {
        let (ca, other) = (TestCa::new(), TestCa::new());
        let (answer, _) = ca.issue(&id("shop", "cart"));
        let [leaf, intermediate, root] = &answer[..] else {
            panic!("{answer:?}")
        };
        let (leaf, intermediate, root, extra) = (leaf.clone(), intermediate.clone(), root.clone(), other.root_pem());
        // Roots in the last string.
        assert_eq!(parsed(&[leaf.clone(), intermediate.clone(), root.clone()]), Ok((2, 1)));
        assert_eq!(
            parsed(&[leaf.clone(), intermediate.clone(), format!("{root}\n{extra}")]),
            Ok((2, 2))
        );
        // One certificate per string.
        assert_eq!(
            parsed(&[leaf.clone(), intermediate.clone(), root.clone(), extra.clone()]),
            Ok((2, 2))
        );
        // Everything in one string.
        assert_eq!(parsed(&[format!("{leaf}{intermediate}{root}{extra}")]), Ok((2, 2)));
        // A cross-signed certificate in the bundle is not an anchor.
        assert_eq!(parsed(&[leaf, format!("{intermediate}{root}")]), Ok((2, 1)));
    }

    #[test]
    fn malformed_answers_are_refused_with_the_reason() {
        let ca = TestCa::new();
        let (answer, _) = ca.issue(&id("shop", "cart"));
        let (leaf, intermediate, root) = (answer[0].clone(), answer[1].clone(), answer[2].clone());
        let truncated = leaf[..leaf.len() / 2].to_string();
        let many: Vec<_> = std::iter::repeat_n(intermediate.clone(), MAX_CHAIN_CERTS + 1)
            .chain([root.clone()])
            .collect();
        let not_pem = |element: usize, error: Result<_, CertificateError>| match error {
            Err(CertificateError::NotPem { element: found, .. }) => assert_eq!(found, element),
            other => panic!("{other:?}"),
        };
        assert_eq!(parsed(&[]), Err(CertificateError::Empty));
        not_pem(0, parsed(&[String::new()]));
        not_pem(0, parsed(&["garbage".into(), root.clone()]));
        not_pem(0, parsed(&[truncated, root.clone()]));
        not_pem(
            1,
            parsed(&[
                leaf.clone(),
                "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n".into(),
            ]),
        );
        assert_eq!(parsed(std::slice::from_ref(&leaf)), Err(CertificateError::NoRoot));
        assert_eq!(parsed(&[leaf.clone(), intermediate]), Err(CertificateError::NoRoot));
        assert_eq!(parsed(&[root]), Err(CertificateError::NoRoot));
        assert!(matches!(parsed(&many), Err(CertificateError::TooMany(_))));
        assert!(matches!(
            parsed(&[leaf, "x".repeat(MAX_CHAIN_BYTES)]),
            Err(CertificateError::TooLarge(_))
        ));
    }

    #[test]
    fn certificates_one_after_the_other_are_taken_apart_and_nothing_else_is() {
        let ca = TestCa::new();
        let (one, two) = (ca.intermediate_der(), TestCa::new().intermediate_der());
        let both = [&one[..], &two[..]].concat();
        assert_eq!(split_der(&both), Ok(vec![one.clone(), two]));
        assert_eq!(split_der(&[]), Ok(Vec::new()));
        for bad in [&both[..both.len() - 1], &[&one[..], b"x"].concat(), b"garbage"] {
            assert!(
                matches!(split_der(bad), Err(CertificateError::Unparsable(_))),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_leaf_of_random_bytes_is_unparsable() {
        for bytes in [vec![], vec![0x30], vec![0x30, 0x82, 0xff, 0xff], vec![0xff; 512]] {
            let der = CertificateDer::from(bytes);
            assert!(matches!(peer_identity(&[der]), Err(CertificateError::Unparsable(_))));
        }
        assert_eq!(peer_identity(&[]), Err(CertificateError::Empty));
    }

    #[test]
    fn a_certificate_with_no_or_two_or_bad_uri_names_has_no_identity() {
        let ca = TestCa::new();
        let found = |names: &[&str]| peer_identity(&[ca.leaf_with_uris(names)]);
        assert_eq!(found(&[]), Err(CertificateError::NoIdentity));
        assert_eq!(
            found(&["spiffe://cluster.local/ns/a/sa/b", "spiffe://cluster.local/ns/a/sa/c"]),
            Err(CertificateError::SeveralIdentities(2))
        );
        assert!(matches!(
            found(&["https://a/b"]),
            Err(CertificateError::BadIdentity { .. })
        ));
        assert_eq!(found(&["spiffe://cluster.local/ns/a/sa/b"]).unwrap(), id("a", "b"));
    }
}
