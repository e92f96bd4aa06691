//! What an operator has named as compromised.

use std::collections::HashSet;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::root::{Digest, Root, sha256};
use crate::identity::chain::{hex, parse};

/// Certificates and keys that count for nothing, whoever names or has signed them.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Distrust {
    certificates: HashSet<Digest>,
    keys: HashSet<Digest>,
}

impl Distrust {
    /// Takes a list: PEM certificates, and lines with a certificate's SHA-256 fingerprint in hexadecimal, with or
    /// without colons. `#` begins a comment. An empty list names nothing.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let text = str::from_utf8(text).map_err(|_| "it is not text".to_owned())?;
        let mut list = Self::default();
        for (number, der) in CertificateDer::pem_slice_iter(text.as_bytes()).enumerate() {
            let fault = |reason: String| format!("certificate {} of it: {reason}", number + 1);
            let der = der.map_err(|error| fault(error.to_string()))?;
            let certificate = parse(&der).map_err(|error| fault(error.to_string()))?;
            list.certificates.insert(sha256(&der));
            list.keys.insert(sha256(certificate.public_key().raw));
        }
        let mut in_block = false;
        for (number, line) in text.lines().enumerate() {
            let line = line.split_once('#').map_or(line, |(before, _)| before).trim();
            if line.starts_with("-----") {
                in_block = line.starts_with("-----BEGIN");
            } else if !in_block && !line.is_empty() {
                let fingerprint = fingerprint(line).ok_or_else(|| {
                    format!(
                        "line {} of it is neither a PEM certificate nor a SHA-256 fingerprint",
                        number + 1
                    )
                })?;
                list.certificates.insert(fingerprint);
            }
        }
        Ok(list)
    }

    /// Adds the keys of those roots that the list names by their fingerprint alone.
    pub(super) fn resolve<'a>(&mut self, roots: impl Iterator<Item = &'a Root>) {
        for root in roots {
            if self.certificates.contains(&root.fingerprint) {
                self.keys.insert(root.key);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.certificates.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.certificates.len()
    }

    pub(super) fn has_root(&self, root: &Root) -> bool {
        self.certificates.contains(&root.fingerprint) || self.keys.contains(&root.key)
    }

    pub(super) fn has(&self, certificate: &[u8], key: &[u8]) -> bool {
        self.keys.contains(&sha256(key)) || self.certificates.contains(&sha256(certificate))
    }

    /// The fingerprints, for a reader.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.certificates.iter().map(|digest| hex(digest)).collect();
        names.sort();
        names
    }
}

fn fingerprint(line: &str) -> Option<Digest> {
    // As openssl prints it: "sha256 Fingerprint=AA:BB:…".
    let digits = line.rsplit_once('=').map_or(line, |(_, digits)| digits).trim();
    let digits: String = digits.chars().filter(|c| *c != ':').collect();
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    let mut digest = [0; 32];
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::TestCa;

    #[test]
    fn a_list_has_certificates_and_fingerprints_and_anything_else_makes_it_a_bad_one() {
        let (one, two) = (TestCa::new(), TestCa::new());
        let name = two.root().name();
        let colons = name.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
        let colons = colons.collect::<Vec<_>>().join(":").to_uppercase();
        for fingerprint in [name, colons.clone(), format!("sha256 Fingerprint={colons}")] {
            let text = format!("# 2026-11-30: stolen\n{}\n{fingerprint} # the other\n", one.root_pem());
            let mut list = Distrust::parse(text.as_bytes()).unwrap();
            assert!(list.has_root(&one.root()) && list.has_root(&two.root()), "{text}");
            assert!(!list.has_root(&TestCa::new().root()));
            assert!(list.keys.contains(&one.root().key) && !list.keys.contains(&two.root().key));
            list.resolve([two.root()].iter());
            assert!(list.keys.contains(&two.root().key));
        }
        assert!(Distrust::parse(b"# nothing\n\n").unwrap().is_empty());
        for text in ["abc", "zz", &"0".repeat(63), &one.root_pem()[..100]] {
            assert!(Distrust::parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(Distrust::parse(&[0xff]).is_err());
    }
}
