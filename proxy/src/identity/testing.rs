//! A certificate authority for tests: real keys and signatures, any mistake on request.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType, SubjectPublicKeyInfo,
};
use rustls_pki_types::CertificateDer;

use super::{Certificate, PrivateKey, SpiffeId};

pub(crate) fn id(namespace: &str, service_account: &str) -> SpiffeId {
    SpiffeId::parse(&format!("spiffe://cluster.local/ns/{namespace}/sa/{service_account}")).unwrap()
}

/// What a leaf is like.
pub(crate) struct LeafOptions {
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
    pub(crate) server_auth: bool,
    pub(crate) client_auth: bool,
}

impl Default for LeafOptions {
    fn default() -> Self {
        let now = SystemTime::now();
        Self {
            not_before: now - Duration::from_secs(60),
            not_after: now + Duration::from_secs(3600),
            server_auth: true,
            client_auth: true,
        }
    }
}

pub(crate) struct TestCa {
    root: CertifiedIssuer<'static, KeyPair>,
    intermediate: CertifiedIssuer<'static, KeyPair>,
}

impl TestCa {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let root = CertifiedIssuer::self_signed(ca_params("root", &key), key).unwrap();
        let key = KeyPair::generate().unwrap();
        let intermediate = CertifiedIssuer::signed_by(ca_params("intermediate", &key), key, &root).unwrap();
        Self { root, intermediate }
    }

    pub(crate) fn root_pem(&self) -> String {
        self.root.pem()
    }

    /// A CA's answer for a fresh key.
    pub(crate) fn issue(&self, id: &SpiffeId) -> (Vec<String>, PrivateKey) {
        self.issue_with(id, LeafOptions::default())
    }

    pub(crate) fn issue_with(&self, id: &SpiffeId, options: LeafOptions) -> (Vec<String>, PrivateKey) {
        let key = PrivateKey::generate().unwrap();
        (self.sign(id, &key.public_key(), options), key)
    }

    /// A CA's answer for a given public key (DER SubjectPublicKeyInfo).
    pub(crate) fn sign(&self, id: &SpiffeId, public_key: &[u8], options: LeafOptions) -> Vec<String> {
        let params = leaf_params(&[id.as_str()], options);
        let public_key = SubjectPublicKeyInfo::from_der(public_key).unwrap();
        let leaf = params.signed_by(&public_key, &self.intermediate).unwrap();
        vec![leaf.pem(), self.intermediate.pem(), self.root.pem()]
    }

    pub(crate) fn certificate(&self, id: &SpiffeId) -> Certificate {
        let (answer, key) = self.issue(id);
        Certificate::new(id, &answer, key).unwrap()
    }

    pub(crate) fn leaf_with_uris(&self, uris: &[&str]) -> CertificateDer<'static> {
        let key = KeyPair::generate().unwrap();
        leaf_params(uris, LeafOptions::default())
            .signed_by(&key, &self.intermediate)
            .unwrap()
            .der()
            .clone()
    }
}

fn ca_params(name: &str, key: &KeyPair) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    // A name of its own for each, as real authorities have.
    let tag: String = key.public_key_raw()[1..9]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    params
        .distinguished_name
        .push(DnType::CommonName, format!("test {name} {tag}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn leaf_params(uris: &[&str], options: LeafOptions) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = uris
        .iter()
        .map(|uri| SanType::URI((*uri).try_into().unwrap()))
        .collect();
    params.not_before = options.not_before.into();
    params.not_after = options.not_after.into();
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    if options.server_auth {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    if options.client_auth {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    }
    params
}
