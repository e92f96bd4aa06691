//! An intermediate from somebody else's hierarchy, in the shape that users of Istio have it in.

use std::time::SystemTime;

use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::X509Certificate;

use super::signer::{self, Signer, x509};

/// The keys of a Secret with an intermediate: certificate, private key, roots, and what is between.
pub const CERTIFICATE: &str = "ca-cert.pem";
/// See [`CERTIFICATE`].
pub const KEY: &str = "ca-key.pem";
/// See [`CERTIFICATE`].
pub const ROOTS: &str = "root-cert.pem";
/// See [`CERTIFICATE`]. May be missing where the root has signed the intermediate.
pub const CHAIN: &str = "cert-chain.pem";
/// Intermediates in a row. Clients bound chains too.
const MAX_ABOVE: usize = 6;

/// An intermediate that was found sound.
pub struct Provided {
    pub(super) signer: Signer,
    /// The certificates between the signer's own and its root.
    pub(super) above: Vec<CertificateDer<'static>>,
    /// The same, PEM.
    pub(super) above_pem: Vec<String>,
    /// The roots, PEM.
    pub(super) roots_pem: String,
}

impl Provided {
    /// Checks that key and certificates belong together, lead to a root, hold now and can sign; or says what is wrong.
    pub fn parse(
        certificate: &[u8],
        key: &[u8],
        roots: &[u8],
        chain: Option<&[u8]>,
        now: SystemTime,
    ) -> Result<Self, String> {
        let signer = Signer::parse_unsigned(key, certificate)?;
        let roots = certificates(ROOTS, roots)?;
        if roots.is_empty() {
            return Err(format!("{ROOTS} has no certificate"));
        }
        for (root, _) in &roots {
            let (_, root) = x509(root)?;
            root.verify_signature(None)
                .map_err(|_| format!("{ROOTS}: {} is no root, as it has not signed itself", root.subject()))?;
            check_validity(ROOTS, &root, now)?;
        }
        let between = certificates(CHAIN, chain.unwrap_or_default())?;
        let above = path(&signer.certificate, &between, &roots, now)?;
        try_signing(&signer, now)?;
        let (above, above_pem) = above.into_iter().unzip();
        let roots_pem = roots.into_iter().map(|(_, pem)| pem).collect();
        Ok(Self {
            signer,
            above,
            above_pem,
            roots_pem,
        })
    }
}

/// A certificate and its PEM.
type Block = (CertificateDer<'static>, String);

fn certificates(name: &str, pem: &[u8]) -> Result<Vec<Block>, String> {
    signer::certificates(pem).map_err(|reason| format!("{name}: {reason}"))
}

fn check_validity(name: &str, certificate: &X509Certificate<'_>, now: SystemTime) -> Result<(), String> {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let (validity, subject) = (certificate.validity(), certificate.subject());
    if validity.not_after.timestamp() <= now {
        return Err(format!("{name}: {subject} has expired"));
    }
    if validity.not_before.timestamp() > now {
        return Err(format!("{name}: {subject} is not valid yet"));
    }
    Ok(())
}

/// The certificates between `first` and one of the roots.
fn path(
    first: &CertificateDer<'static>,
    between: &[Block],
    roots: &[Block],
    now: SystemTime,
) -> Result<Vec<Block>, String> {
    let mut path: Vec<Block> = Vec::new();
    loop {
        let last = path.last().map_or(first, |(der, _)| der);
        let (_, below) = x509(last)?;
        check_validity(if path.is_empty() { CERTIFICATE } else { CHAIN }, &below, now)?;
        // Or it is a root itself: then it is sent as the root only.
        if roots.iter().any(|(root, _)| root == last || has_signed(root, &below)) {
            return Ok(path);
        }
        let next = between.iter().find(|(candidate, _)| {
            candidate != first && path.iter().all(|(seen, _)| seen != candidate) && has_signed(candidate, &below)
        });
        match next {
            Some(next) if path.len() < MAX_ABOVE => path.push(next.clone()),
            _ => {
                let subject = below.subject();
                return Err(format!("no certificate of {ROOTS} or {CHAIN} has signed {subject}"));
            }
        }
    }
}

fn has_signed(above: &CertificateDer<'_>, below: &X509Certificate<'_>) -> bool {
    let Ok((_, above)) = x509(above) else { return false };
    above.is_ca()
        && above.subject().as_raw() == below.issuer().as_raw()
        && below.verify_signature(Some(above.public_key())).is_ok()
}

/// A name or key that our library writes otherwise than it was read would make every certificate useless.
fn try_signing(signer: &Signer, now: SystemTime) -> Result<(), String> {
    let failed = |e: &dyn std::fmt::Display| format!("signing by it failed: {e}");
    let pair = KeyPair::generate().map_err(|e| failed(&e))?;
    let ttl = std::time::Duration::from_secs(60);
    let (leaf, _, _) = signer
        .sign_leaf(&pair, Vec::new(), Vec::new(), ttl, now)
        .map_err(|e| failed(&e))?;
    let (_, leaf) = x509(leaf.der())?;
    if has_signed(&signer.certificate, &leaf) {
        Ok(())
    } else {
        Err("what it signs does not verify: its name is written in a form that is not supported".into())
    }
}
