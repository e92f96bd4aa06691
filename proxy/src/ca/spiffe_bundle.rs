//! The roots in the form in which SPIFFE's bundle endpoints serve them: a set of JSON Web Keys.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use x509_parser::public_key::PublicKey;

use super::signer;

/// How often clients should look, in seconds.
const REFRESH_HINT: u64 = 300;

/// The bundle of these roots, PEM. Roots with keys of other kinds than RSA, P-256 and P-384 are left out.
pub(super) fn bundle(roots: &str, sequence: Option<u64>) -> Value {
    let certificates = signer::certificates(roots.as_bytes()).unwrap_or_default();
    let keys: Vec<Value> = certificates
        .iter()
        .filter_map(|(der, pem)| {
            let mut key = key(&signer::x509(der).ok()?.1)?;
            let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
            key["use"] = "x509-svid".into();
            key["x5c"] = json!([body]);
            Some(key)
        })
        .collect();
    let mut bundle = json!({"keys": keys, "spiffe_refresh_hint": REFRESH_HINT});
    if let Some(sequence) = sequence {
        bundle["spiffe_sequence"] = sequence.into();
    }
    bundle
}

fn key(certificate: &x509_parser::prelude::X509Certificate<'_>) -> Option<Value> {
    match certificate.public_key().parsed().ok()? {
        PublicKey::EC(point) => {
            let (form, coordinates) = point.data().split_first()?;
            let curve = match (form, coordinates.len()) {
                (4, 64) => "P-256",
                (4, 96) => "P-384",
                _ => return None,
            };
            let (x, y) = coordinates.split_at(coordinates.len() / 2);
            Some(json!({"kty": "EC", "crv": curve, "x": base64url(x), "y": base64url(y)}))
        }
        PublicKey::RSA(key) => {
            let [n, e] = [key.modulus, key.exponent].map(|number| {
                let leading = number.iter().take_while(|byte| **byte == 0).count();
                base64url(&number[leading..])
            });
            Some(json!({"kty": "RSA", "n": n, "e": e}))
        }
        _ => None,
    }
}

/// RFC 4648, section 5, without padding.
fn base64url(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::keyring::{Keyring, Step};
    use super::*;
    use crate::identity::TrustDomain;

    #[test]
    fn text_is_encoded_as_the_rfc_says() {
        for (bytes, expected) in [
            (&b""[..], ""),
            (b"f", "Zg"),
            (b"fo", "Zm8"),
            (b"foo", "Zm9v"),
            (&[0xfb, 0xff], "-_8"),
        ] {
            assert_eq!(base64url(bytes), expected);
        }
    }

    #[test]
    fn each_root_is_a_key_with_its_certificate() {
        let domain = TrustDomain::parse("cluster.local").unwrap();
        let mut keyring = Keyring::found(&domain, SystemTime::now()).unwrap();
        keyring.take(Step::Publish, false, &domain, SystemTime::now());
        let bundle = bundle(&keyring.bundle(), Some(keyring.revision));
        let keys = bundle["keys"].as_array().unwrap();
        assert_eq!((keys.len(), &bundle["spiffe_sequence"]), (2, &json!(1)));
        assert_eq!(bundle["spiffe_refresh_hint"], 300);
        for key in keys {
            assert_eq!(
                (&key["kty"], &key["crv"], &key["use"]),
                (&json!("EC"), &json!("P-256"), &json!("x509-svid"))
            );
            assert_eq!(
                [key["x"].as_str().unwrap().len(), key["y"].as_str().unwrap().len()],
                [43, 43]
            );
            let pem = format!(
                "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
                key["x5c"][0].as_str().unwrap()
            );
            assert_eq!(signer::certificates(pem.as_bytes()).unwrap().len(), 1);
        }
    }
}
