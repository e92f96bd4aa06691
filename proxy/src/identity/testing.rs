//! A certificate authority for tests: real keys and signatures, any mistake on request.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, CrlDistributionPoint,
    CrlIssuingDistributionPoint, CrlScope, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod,
    KeyPair, KeyUsagePurpose, PublicKeyData as _, RevokedCertParams, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls_pki_types::CertificateDer;

use super::trust::Root;
use super::{Certificate, PrivateKey, SpiffeId};

/// A root with an RSA key of 1024 bits.
pub(crate) const WEAK_RSA_ROOT: &str = include_str!("testdata/weak-rsa.pem");
/// A leaf that is signed with SHA-1, and its root.
pub(crate) const SHA1_LEAF_AND_ROOT: &str = include_str!("testdata/sha1.pem");

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

/// What a revocation list is like.
pub(crate) struct CrlOptions {
    pub(crate) this_update: SystemTime,
    pub(crate) next_update: SystemTime,
    /// One part of several, for leaves.
    pub(crate) only_leaves: bool,
    /// Of the root, not of the intermediate.
    pub(crate) of_root: bool,
}

impl Default for CrlOptions {
    fn default() -> Self {
        let now = SystemTime::now();
        Self {
            this_update: now - Duration::from_secs(60),
            next_update: now + Duration::from_secs(86_400),
            only_leaves: false,
            of_root: false,
        }
    }
}

pub(crate) struct TestCrl {
    pub(crate) pem: String,
    pub(crate) der: Vec<u8>,
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
    name: String,
    root: CertifiedIssuer<'static, KeyPair>,
    intermediate: CertifiedIssuer<'static, KeyPair>,
}

impl TestCa {
    pub(crate) fn new() -> Self {
        let [root, intermediate] = [(); 2].map(|()| KeyPair::generate().unwrap());
        // A name of its own for each, as real authorities have.
        let tag: String = root.public_key_raw()[1..9]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Self::made(&tag, root, intermediate, |_| {})
    }

    /// One whose names are another's too, as with an authority that makes itself a new key.
    pub(crate) fn named(name: &str) -> Self {
        let [root, intermediate] = [(); 2].map(|()| KeyPair::generate().unwrap());
        Self::made(name, root, intermediate, |_| {})
    }

    /// One whose intermediate is made otherwise.
    pub(crate) fn with_intermediate(change: impl FnOnce(&mut CertificateParams)) -> Self {
        let [root, intermediate] = [(); 2].map(|()| KeyPair::generate().unwrap());
        Self::made("odd", root, intermediate, change)
    }

    fn made(name: &str, root: KeyPair, intermediate: KeyPair, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let root = CertifiedIssuer::self_signed(ca_params(&format!("root {name}")), root).unwrap();
        let mut params = ca_params(&format!("intermediate {name}"));
        change(&mut params);
        let intermediate = CertifiedIssuer::signed_by(params, intermediate, &root).unwrap();
        Self {
            name: name.to_owned(),
            root,
            intermediate,
        }
    }

    pub(in crate::identity) fn root(&self) -> Root {
        Root::parse(self.root.der()).unwrap()
    }

    pub(crate) fn intermediate_der(&self) -> CertificateDer<'static> {
        self.intermediate.der().clone()
    }

    /// This root's key and name, certified by another root.
    pub(crate) fn cross_signed_by(&self, other: &Self) -> String {
        let params = ca_params(&format!("root {}", self.name));
        params.signed_by(self.root.key(), &other.root).unwrap().pem()
    }

    /// The intermediate's name in DER, without tag and length, and its public key.
    pub(crate) fn intermediate_name_and_key(&self) -> (Vec<u8>, Vec<u8>) {
        let leaf = self.leaf_with_uris(&[]);
        let issuer = super::chain::parse(&leaf).unwrap().issuer().as_raw()[2..].to_vec();
        (issuer, self.intermediate.key().subject_public_key_info())
    }

    /// The intermediate's revocation list.
    pub(crate) fn crl(&self, serials: &[&[u8]], options: CrlOptions) -> TestCrl {
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from_slice(serial),
            revocation_time: options.this_update.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: options.this_update.into(),
            next_update: options.next_update.into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: options.only_leaves.then(|| CrlIssuingDistributionPoint {
                distribution_point: CrlDistributionPoint {
                    uris: vec!["http://crl.example/1".into()],
                },
                scope: Some(CrlScope::UserCertsOnly),
            }),
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let issuer = if options.of_root {
            &self.root
        } else {
            &self.intermediate
        };
        let crl = params.signed_by(issuer).unwrap();
        TestCrl {
            pem: crl.pem().unwrap(),
            der: crl.der().to_vec(),
        }
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

    /// A leaf of another kind, for a fresh key, signed by the intermediate.
    pub(crate) fn odd_leaf(
        &self,
        id: &SpiffeId,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (CertificateDer<'static>, PrivateKey) {
        let key = PrivateKey::generate().unwrap();
        let mut params = leaf_params(&[id.as_str()], LeafOptions::default());
        change(&mut params);
        let public_key = SubjectPublicKeyInfo::from_der(&key.public_key()).unwrap();
        (
            params.signed_by(&public_key, &self.intermediate).unwrap().der().clone(),
            key,
        )
    }

    /// A leaf for this public key (DER SubjectPublicKeyInfo).
    pub(crate) fn leaf_for_key(&self, id: &SpiffeId, public_key: &[u8]) -> CertificateDer<'static> {
        let public_key = SubjectPublicKeyInfo::from_der(public_key).unwrap();
        let params = leaf_params(&[id.as_str()], LeafOptions::default());
        params.signed_by(&public_key, &self.intermediate).unwrap().der().clone()
    }

    /// A leaf that one has signed who is below the intermediate, made by `change`: that one's certificate, the leaf, and
    /// its key.
    pub(crate) fn leaf_below(
        &self,
        id: &SpiffeId,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (CertificateDer<'static>, CertificateDer<'static>, PrivateKey) {
        let mut params = ca_params("below");
        change(&mut params);
        let below = CertifiedIssuer::signed_by(params, KeyPair::generate().unwrap(), &self.intermediate).unwrap();
        let key = PrivateKey::generate().unwrap();
        let public_key = SubjectPublicKeyInfo::from_der(&key.public_key()).unwrap();
        let params = leaf_params(&[id.as_str()], LeafOptions::default());
        let leaf = params.signed_by(&public_key, &below).unwrap().der().clone();
        (below.der().clone(), leaf, key)
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

fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, format!("test {name}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
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
