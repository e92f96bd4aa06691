//! Certificate revocation lists: taken apart, and asked about one certificate of a verified path.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rustls_pki_types::CertificateRevocationListDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::x509::SubjectPublicKeyInfo;

use super::certificates::{Fault, key_fault, signature_fault};
use super::root::{Digest, sha256};
use crate::identity::chain::system_time;

/// How many signers' keys a list remembers to have been checked with.
const MAX_SIGNERS: usize = 64;

/// One list. Whether it is signed by the issuer that it names is found out once for each key that the issuer has had.
#[derive(Debug)]
pub(super) struct Crl {
    der: Box<[u8]>,
    /// The issuer's name in DER.
    pub(super) issuer: Box<[u8]>,
    /// The issuer's name for a reader.
    pub(super) issuer_name: Box<str>,
    pub(super) this_update: SystemTime,
    pub(super) next_update: Option<SystemTime>,
    /// Serial numbers without leading zeros.
    revoked: HashSet<Box<[u8]>>,
    scope: Scope,
    signers: Mutex<HashMap<Digest, bool>>,
}

/// For which of the issuer's certificates a list says that they are not revoked, when it does not name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    Leaves,
    Authorities,
    /// One of several parts, of which it is not known which certificates belong to it.
    Part,
}

/// A certificate of a path, as lists speak of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject<'a> {
    pub(super) serial: &'a [u8],
    /// The issuer's name in DER, without tag and length.
    pub(super) issuer: &'a [u8],
    /// The issuer's public key in DER.
    pub(super) issuer_key: &'a [u8],
    pub(super) is_leaf: bool,
}

/// The algorithms of lists' signatures that can be verified: RSA (PKCS #1 and PSS) and ECDSA with SHA-2, Ed25519. Not
/// ECDSA with SHA-512, by which P-521 keys sign.
const VERIFIABLE: [&str; 7] = [
    "1.2.840.113549.1.1.10",
    "1.2.840.113549.1.1.11",
    "1.2.840.113549.1.1.12",
    "1.2.840.113549.1.1.13",
    "1.2.840.10045.4.3.2",
    "1.2.840.10045.4.3.3",
    "1.3.101.112",
];

/// What the lists say of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    Revoked,
    Good,
    /// The lists that speak of it are out of date.
    Expired,
    /// None speaks of it.
    Nothing,
}

/// Asks all lists.
pub(super) fn ask(crls: &[Arc<Crl>], subject: &Subject<'_>, at: SystemTime) -> Word {
    let mut word = Word::Nothing;
    for crl in crls.iter().filter(|crl| crl.is_from(subject)) {
        if crl.revoked.contains(trimmed(subject.serial)) {
            return Word::Revoked;
        }
        let speaks = match crl.scope {
            Scope::All => true,
            Scope::Leaves => subject.is_leaf,
            Scope::Authorities => !subject.is_leaf,
            Scope::Part => false,
        };
        if speaks && crl.next_update.is_none_or(|next| at < next) {
            word = Word::Good;
        } else if speaks && word == Word::Nothing {
            word = Word::Expired;
        }
    }
    word
}

impl Crl {
    /// Takes a file of lists: PEM blocks `X509 CRL`, or DER.
    pub(super) fn parse_file(bytes: &[u8]) -> Result<Vec<Self>, String> {
        let mut crls = Vec::new();
        if bytes.windows(11).any(|some| some == b"-----BEGIN ") {
            for (number, der) in CertificateRevocationListDer::pem_slice_iter(bytes).enumerate() {
                let fault = |reason: String| format!("list {} of it: {reason}", number + 1);
                let der = der.map_err(|error| fault(error.to_string()))?;
                crls.push(Self::parse(&der).map(|(crl, _)| crl).map_err(fault)?);
            }
        } else {
            let mut left = bytes;
            while !left.is_empty() {
                let (crl, rest) =
                    Self::parse(left).map_err(|reason| format!("list {} of it: {reason}", crls.len() + 1))?;
                crls.push(crl);
                left = rest;
            }
        }
        if crls.is_empty() {
            return Err("it has no revocation list (PEM blocks X509 CRL, or DER)".into());
        }
        Ok(crls)
    }

    fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), String> {
        let (rest, list) = CertificateRevocationList::from_der(bytes)
            .map_err(|error| format!("not a certificate revocation list: {error}"))?;
        if let Some(Fault(fault)) = signature_fault(&list.signature_algorithm) {
            return Err(fault);
        }
        let algorithm = list.signature_algorithm.algorithm.to_id_string();
        if !VERIFIABLE.contains(&&*algorithm) {
            return Err(format!(
                "it is signed by the algorithm {algorithm}, which cannot be verified here"
            ));
        }
        let mut scope = Scope::All;
        for extension in list.extensions() {
            match extension.parsed_extension() {
                ParsedExtension::IssuingDistributionPoint(point) => {
                    if point.indirect_crl || point.only_some_reasons.is_some() || point.only_contains_attribute_certs {
                        return Err(
                            "lists of other issuers' certificates, of some reasons only, or of attribute \
                                    certificates are not understood"
                                .into(),
                        );
                    }
                    scope = match (
                        &point.distribution_point,
                        point.only_contains_user_certs,
                        point.only_contains_ca_certs,
                    ) {
                        (Some(_), ..) => Scope::Part,
                        (None, true, false) => Scope::Leaves,
                        (None, false, true) => Scope::Authorities,
                        _ => Scope::All,
                    };
                }
                _ if extension.critical => {
                    return Err(format!("its critical extension {} is not understood", extension.oid));
                }
                _ => {}
            }
        }
        let crl = Self {
            der: list.as_raw().into(),
            issuer: list.issuer().as_raw().into(),
            issuer_name: list.issuer().to_string().into(),
            this_update: system_time(list.last_update().timestamp()),
            next_update: list.next_update().map(|time| system_time(time.timestamp())),
            revoked: list
                .iter_revoked_certificates()
                .map(|one| trimmed(one.raw_serial()).into())
                .collect(),
            scope,
            signers: Mutex::default(),
        };
        Ok((crl, rest))
    }

    /// How many certificates it revokes.
    pub(super) fn len(&self) -> usize {
        self.revoked.len()
    }

    fn is_from(&self, subject: &Subject<'_>) -> bool {
        content(&self.issuer) == Some(subject.issuer) && self.is_signed_by(subject.issuer_key)
    }

    fn is_signed_by(&self, key: &[u8]) -> bool {
        let mut signers = self.signers.lock().unwrap_or_else(PoisonError::into_inner);
        let digest = sha256(key);
        if let Some(known) = signers.get(&digest) {
            return *known;
        }
        if signers.len() >= MAX_SIGNERS {
            signers.clear();
        }
        let signed = self.verify(key);
        signers.insert(digest, signed);
        signed
    }

    fn verify(&self, key: &[u8]) -> bool {
        let (Ok((_, key)), Ok((_, list))) = (
            SubjectPublicKeyInfo::from_der(key),
            CertificateRevocationList::from_der(&self.der),
        ) else {
            return false;
        };
        key_fault(&key).is_none() && list.verify_signature(&key).is_ok()
    }
}

/// What a DER element has after its tag and length.
pub(super) fn content(element: &[u8]) -> Option<&[u8]> {
    let header = match *element.get(1)? {
        short if short < 0x80 => 2,
        long => 2 + usize::from(long & 0x7f),
    };
    element.get(header..)
}

fn trimmed(serial: &[u8]) -> &[u8] {
    let zeros = serial.iter().take_while(|byte| **byte == 0).count();
    &serial[zeros..]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::identity::testing::{CrlOptions, TestCa};

    const DAY: Duration = Duration::from_secs(86_400);

    fn parsed(bytes: &[u8]) -> Vec<Arc<Crl>> {
        Crl::parse_file(bytes).unwrap().into_iter().map(Arc::new).collect()
    }

    #[test]
    fn lists_are_read_as_pem_and_der_one_and_several() {
        let (one, two) = (TestCa::new(), TestCa::new());
        let (a, b) = (
            one.crl(&[&[1], &[0, 2]], CrlOptions::default()),
            two.crl(&[], CrlOptions::default()),
        );
        for (bytes, count) in [
            (a.pem.clone().into_bytes(), 1),
            (format!("{}{}", a.pem, b.pem).into_bytes(), 2),
            (a.der.clone(), 1),
            ([a.der.clone(), b.der.clone()].concat(), 2),
        ] {
            let crls = parsed(&bytes);
            assert_eq!((crls.len(), crls[0].len()), (count, 2));
        }
        let half = &a.der[..a.der.len() / 2];
        let half_pem = format!("{}{}", b.pem, &a.pem[..a.pem.len() / 2]);
        for bytes in [
            &b""[..],
            b"garbage",
            half,
            half_pem.as_bytes(),
            one.root_pem().as_bytes(),
        ] {
            assert!(Crl::parse_file(bytes).is_err());
        }
    }

    #[test]
    fn a_list_speaks_for_its_issuers_key_its_scope_and_its_time() {
        let (ca, same_name) = (TestCa::named("twin"), TestCa::named("twin"));
        let now = SystemTime::now();
        let crls = parsed(&ca.crl(&[&[0, 7]], CrlOptions::default()).der);
        let (issuer, key) = ca.intermediate_name_and_key();
        let of = |serial: &'static [u8], is_leaf| Subject {
            serial,
            issuer: &issuer,
            issuer_key: &key,
            is_leaf,
        };
        assert_eq!(ask(&crls, &of(&[7], true), now), Word::Revoked);
        assert_eq!(ask(&crls, &of(&[0, 7], true), now + 400 * DAY), Word::Revoked);
        assert_eq!(ask(&crls, &of(&[8], true), now), Word::Good);
        assert_eq!(ask(&crls, &of(&[8], true), now + 400 * DAY), Word::Expired);
        assert_eq!(ask(&[], &of(&[7], true), now), Word::Nothing);
        // The same name, another key: as with an authority that has made itself a new key.
        let (_, other) = same_name.intermediate_name_and_key();
        let twin = Subject {
            issuer_key: &other,
            ..of(&[7], true)
        };
        assert_eq!(ask(&crls, &twin, now), Word::Nothing);

        let leaves = CrlOptions {
            only_leaves: true,
            ..CrlOptions::default()
        };
        // A distribution point has a name here: one part of several.
        let crls = parsed(&ca.crl(&[&[7]], leaves).der);
        assert_eq!(ask(&crls, &of(&[8], true), now), Word::Nothing);
        assert_eq!(ask(&crls, &of(&[7], true), now), Word::Revoked);
    }

    #[test]
    fn contents_of_der_elements_are_told_whatever_the_form_of_the_length() {
        assert_eq!(content(&[0x30, 1, 9]), Some(&[9][..]));
        let long: Vec<u8> = [0x30, 0x81, 200].into_iter().chain([7; 200]).collect();
        assert_eq!(content(&long), Some(&[7; 200][..]));
        assert_eq!(content(&[]), None);
        assert_eq!(content(&[0x30, 0xff]), None);
    }
}
