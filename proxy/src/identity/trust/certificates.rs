//! Files of certificates, and which keys and signatures are too weak to count.

use std::sync::Arc;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::{AlgorithmIdentifier, SubjectPublicKeyInfo};

use super::root::Root;
use crate::identity::CertificateError;

/// The shortest RSA key that counts.
const MIN_RSA_BITS: usize = 2048;

/// What is wrong with a key or a signature, for a reader.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault(pub(super) String);

/// A bundle: what a file of certificates gives, and what in it does not count, and why.
#[derive(Debug, Default, Clone)]
pub(super) struct Bundle {
    pub(super) roots: Vec<Arc<Root>>,
    pub(super) ignored: Vec<String>,
}

impl Bundle {
    /// Takes a file of PEM certificates. Each is trusted for its own sake, so that one which is no authority makes the
    /// whole file doubtful; a weak key or a second copy is only left out.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let mut bundle = Self::default();
        for (number, der) in CertificateDer::pem_slice_iter(text).enumerate() {
            let fault = |reason: String| format!("certificate {} of it: {reason}", number + 1);
            let der = der.map_err(|error| fault(error.to_string()))?;
            match Root::parse(&der) {
                Ok(root) if bundle.roots.iter().any(|known| known.fingerprint == root.fingerprint) => {}
                Ok(root) => bundle.roots.push(Arc::new(root)),
                Err(error @ CertificateError::Weak(_)) => bundle.ignored.push(error.to_string()),
                Err(error) => return Err(fault(error.to_string())),
            }
        }
        if bundle.roots.is_empty() {
            return Err(match bundle.ignored.first() {
                Some(reason) => format!("none of its certificates may be a root: {reason}"),
                None => "it has no certificate (a PEM block CERTIFICATE)".into(),
            });
        }
        Ok(bundle)
    }
}

/// Why this key is not strong enough, or none of those that are spoken here.
pub(super) fn key_fault(key: &SubjectPublicKeyInfo<'_>) -> Option<Fault> {
    let fault = match key.parsed() {
        Ok(PublicKey::RSA(rsa)) if rsa.key_size() < MIN_RSA_BITS => {
            format!("an RSA key of {} bits; it takes {MIN_RSA_BITS}", rsa.key_size())
        }
        Ok(PublicKey::RSA(_)) => return None,
        Ok(PublicKey::EC(point)) if matches!(point.key_size(), 256 | 384 | 528) => return None,
        Ok(PublicKey::EC(point)) => format!(
            "an elliptic curve of {} bits; it takes P-256 or better",
            point.key_size()
        ),
        _ if key.algorithm.algorithm.to_id_string() == "1.3.101.112" => return None,
        Ok(PublicKey::DSA(_)) => "a DSA key".into(),
        _ => format!("a key of the unknown kind {}", key.algorithm.algorithm.to_id_string()),
    };
    Some(Fault(fault))
}

/// Why a signature of this algorithm proves nothing.
pub(super) fn signature_fault(algorithm: &AlgorithmIdentifier<'_>) -> Option<Fault> {
    let name = match algorithm.algorithm.to_id_string().as_str() {
        "1.2.840.113549.1.1.2" | "1.2.840.113549.1.1.4" => "MD2 or MD5",
        "1.2.840.113549.1.1.5" | "1.3.14.3.2.29" | "1.2.840.10045.4.1" | "1.2.840.10040.4.3" => "SHA-1",
        _ => return None,
    };
    Some(Fault(format!("it is signed with {name}, which can be forged")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{TestCa, WEAK_RSA_ROOT};

    #[test]
    fn a_bundle_has_each_root_once_and_doubtful_files_give_none() {
        let (one, two) = (TestCa::new(), TestCa::new());
        let both = format!("{}# a comment\n{}{}", one.root_pem(), two.root_pem(), one.root_pem());
        assert_eq!(Bundle::parse(both.as_bytes()).unwrap().roots.len(), 2);
        let (answer, _) = one.issue(&crate::identity::testing::id("shop", "cart"));
        for (text, reason) in [
            (String::new(), "it has no certificate"),
            ("garbage".into(), "it has no certificate"),
            (one.root_pem()[..200].to_owned(), "certificate 1 of it"),
            (
                format!("{}{}", one.root_pem(), &two.root_pem()[..200]),
                "certificate 2 of it",
            ),
            (format!("{}{}", one.root_pem(), answer[0]), "is not an authority"),
            (WEAK_RSA_ROOT.into(), "an RSA key of 1024 bits"),
        ] {
            let error = Bundle::parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        let some = format!("{WEAK_RSA_ROOT}{}", one.root_pem());
        let bundle = Bundle::parse(some.as_bytes()).unwrap();
        assert_eq!((bundle.roots.len(), bundle.ignored.len()), (1, 1));
    }
}
