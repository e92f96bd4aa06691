//! Promises about what callers send, held against any bytes.

use std::sync::OnceLock;
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jsonwebtoken::Algorithm;
use rcgen::{ExtendedKeyUsagePurpose, PublicKeyData as _, SanType};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, ParsedExtension, X509Certificate};

use super::csr::public_key;
use super::jwks::{self, VerifyingKey};
use super::signer::{Signer, make_root};
use super::token::{Claims, Expected, MAX_TOKEN_BYTES};
use crate::identity::TrustDomain;
use crate::identity::fuzz::{KNOWN_ID, NOW};

/// The key set of an issuer that has only ever made tokens for [`KNOWN_POD`], and whose private key nobody has any more.
const JWKS: &[u8] = include_bytes!("../fuzzing/jwks.json");
pub(crate) const KNOWN_POD: &str = "adit-node-1";
pub(crate) const ISSUER: &str = "issuer";
pub(crate) const AUDIENCE: &str = "adit-ca";

/// From a signing request that is accepted, PEM or DER, comes a key and nothing else: the certificate of that key has the name
/// and the extensions that we give it, whatever the request asks for.
pub(crate) fn csr(data: &[u8]) {
    let pem = match str::from_utf8(data) {
        Ok(text) if text.starts_with("-----") => text.to_owned(),
        _ => {
            let body = STANDARD.encode(data);
            format!("-----BEGIN CERTIFICATE REQUEST-----\n{body}\n-----END CERTIFICATE REQUEST-----\n")
        }
    };
    let Ok(key) = public_key(&pem) else { return };
    static SIGNER: OnceLock<Signer> = OnceLock::new();
    let signer = SIGNER.get_or_init(|| {
        let domain = TrustDomain::parse("cluster.local").expect("a trust domain");
        let root = make_root(&domain, UNIX_EPOCH + NOW).expect("a root");
        Signer::parse(&root, &root, None).expect("the root that was made")
    });
    let names = vec![SanType::URI(KNOWN_ID.try_into().expect("a name"))];
    let usage = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let signed = signer.sign_leaf(&key, names, usage, Duration::from_secs(3600), UNIX_EPOCH + NOW);
    let (leaf, ..) = signed.expect("a key that is accepted can be certified");
    let der: &CertificateDer<'_> = leaf.der();
    let (_, leaf) = X509Certificate::from_der(der).expect("a certificate that we have made");
    assert_eq!(leaf.public_key().raw, key.subject_public_key_info());
    assert_eq!(leaf.subject().iter().count(), 0);
    for extension in leaf.extensions() {
        match extension.parsed_extension() {
            ParsedExtension::BasicConstraints(constraints) => assert!(!constraints.ca),
            ParsedExtension::SubjectAlternativeName(names) => assert_eq!(names.general_names.len(), 1),
            ParsedExtension::KeyUsage(usage) => assert!(!usage.key_cert_sign()),
            ParsedExtension::ExtendedKeyUsage(usage) => assert!(!usage.any),
            ParsedExtension::AuthorityKeyIdentifier(_) | ParsedExtension::SubjectKeyIdentifier(_) => {}
            other => panic!("an extension that we do not give: {other:?}"),
        }
    }
}

/// Whose token is accepted is the one for whom the issuer made it. The same claims without a signature, as an API server that
/// is believed would tell them, name an account that reads back as it is written.
pub(crate) fn token(data: &[u8]) {
    static KEYS: OnceLock<Vec<VerifyingKey>> = OnceLock::new();
    let keys = KEYS.get_or_init(|| jwks::parse(JWKS).expect("the kept key set is one"));
    let Ok(text) = str::from_utf8(data) else { return };
    let expected = Expected {
        issuer: ISSUER.to_owned(),
        audiences: vec![AUDIENCE.to_owned()],
    };
    let now = UNIX_EPOCH + NOW;
    if let Ok(caller) = expected.verify(text, keys, now) {
        assert!(text.len() <= MAX_TOKEN_BYTES);
        assert_eq!(caller.pod.map(|pod| pod.name).as_deref(), Some(KNOWN_POD));
    }
    let Ok(claims) = serde_json::from_str::<Claims>(text) else {
        return;
    };
    let (subject, expires) = (claims.sub.clone(), claims.exp);
    if let Ok(caller) = expected.caller(claims, now) {
        assert!(expires > NOW.as_secs());
        let account = &caller.account;
        assert_eq!(
            subject,
            format!("system:serviceaccount:{}:{}", account.namespace, account.name)
        );
        assert_eq!(account.to_string().parse().as_ref(), Ok(account));
    }
}

/// A key set that is accepted has keys of the kinds that tokens may be signed with, and none other.
pub(crate) fn jwks(data: &[u8]) {
    let Ok(keys) = jwks::parse(data) else { return };
    assert!(!keys.is_empty());
    for key in keys {
        assert!(matches!(key.algorithm, Algorithm::RS256 | Algorithm::ES256));
    }
}

/// A token that was made at some time, to begin with.
#[cfg(test)]
pub(crate) fn token_of(request: &super::token::TokenRequest, made: std::time::SystemTime) -> Vec<u8> {
    let token = super::mint::make_at(request, made).expect("a token");
    token.into_bytes()
}
