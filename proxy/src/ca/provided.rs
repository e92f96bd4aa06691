//! An intermediate from somebody else's hierarchy, in the shape that users of Istio have it in.

use std::time::SystemTime;

use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::X509Certificate;

use super::signer::{self, Signer, x509};

/// The keys of a Secret with an intermediate: certificate, private key, roots, and what is between.
pub(super) const CERTIFICATE: &str = "ca-cert.pem";
/// See [`CERTIFICATE`].
pub(super) const KEY: &str = "ca-key.pem";
/// See [`CERTIFICATE`].
pub(super) const ROOTS: &str = "root-cert.pem";
/// See [`CERTIFICATE`]. May be missing where the root has signed the intermediate.
pub(super) const CHAIN: &str = "cert-chain.pem";
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

impl Provided {
    /// Whether who trusts these roots, PEM, trusts what it signs.
    pub(super) fn leads_to(&self, roots: &str, now: SystemTime) -> bool {
        let Ok(roots) = signer::certificates(roots.as_bytes()) else {
            return false;
        };
        let between: Vec<Block> = self.above.iter().cloned().zip(self.above_pem.iter().cloned()).collect();
        path(&self.signer.certificate, &between, &roots, now).is_ok()
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyUsagePurpose,
        PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_RSA_SHA256, SignatureAlgorithm,
    };

    use super::*;

    struct Made {
        issuer: Issuer<'static, KeyPair>,
        pem: String,
        key: String,
    }

    fn make(name: &str, algorithm: &'static SignatureAlgorithm, is_ca: IsCa, days: i64, above: Option<&Made>) -> Made {
        let pair = KeyPair::generate_for(algorithm).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = is_ca;
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let now = time::OffsetDateTime::now_utc();
        params.not_before = now - time::Duration::days(30);
        params.not_after = now + time::Duration::days(days);
        let pem = match above {
            Some(above) => params.signed_by(&pair, &above.issuer).unwrap().pem(),
            None => params.self_signed(&pair).unwrap().pem(),
        };
        Made {
            key: pair.serialize_pem(),
            pem,
            issuer: Issuer::new(params, pair),
        }
    }

    fn ca(depth: u8) -> IsCa {
        IsCa::Ca(BasicConstraints::Constrained(depth))
    }

    fn parse(certificate: &str, key: &str, roots: &str, chain: Option<&str>) -> Result<Provided, String> {
        let chain = chain.map(str::as_bytes);
        Provided::parse(
            certificate.as_bytes(),
            key.as_bytes(),
            roots.as_bytes(),
            chain,
            SystemTime::now(),
        )
    }

    #[test]
    fn an_intermediate_with_every_kind_of_key_is_taken_with_what_is_above_it() {
        let root = make("root", &PKCS_RSA_SHA256, ca(2), 300, None);
        let upper = make("upper", &PKCS_ECDSA_P384_SHA384, ca(1), 300, Some(&root));
        for algorithm in [&PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384, &PKCS_RSA_SHA256] {
            let lower = make("lower", algorithm, ca(0), 90, Some(&upper));
            // As Istio has it, as cert-manager has it, and with the root too.
            for chain in [
                [&*lower.pem, &*upper.pem].concat(),
                upper.pem.clone(),
                [&*lower.pem, &*upper.pem, &*root.pem].concat(),
            ] {
                let provided = parse(&lower.pem, &lower.key, &root.pem, Some(&chain)).unwrap();
                assert_eq!(provided.above_pem, std::slice::from_ref(&upper.pem));
                assert_eq!(provided.roots_pem, root.pem);
            }
        }
        let direct = make("direct", &PKCS_ECDSA_P256_SHA256, ca(0), 90, Some(&root));
        assert!(
            parse(&direct.pem, &direct.key, &root.pem, None)
                .unwrap()
                .above
                .is_empty()
        );
        assert!(parse(&root.pem, &root.key, &root.pem, None).unwrap().above.is_empty());
    }

    #[test]
    fn what_is_not_sound_is_refused_with_the_reason() {
        let root = make("root", &PKCS_ECDSA_P256_SHA256, ca(2), 300, None);
        let other = make("other", &PKCS_ECDSA_P256_SHA256, ca(2), 300, None);
        let upper = make("upper", &PKCS_ECDSA_P256_SHA256, ca(1), 300, Some(&root));
        let lower = make("lower", &PKCS_ECDSA_P256_SHA256, ca(0), 90, Some(&upper));
        let old = make("old", &PKCS_ECDSA_P256_SHA256, ca(0), -1, Some(&root));
        let old_root = make("old root", &PKCS_ECDSA_P256_SHA256, ca(0), -1, None);
        let leaf = make("leaf", &PKCS_ECDSA_P256_SHA256, IsCa::ExplicitNoCa, 90, Some(&root));
        let chain = Some(&*upper.pem);
        for (what, result, reason) in [
            (
                "another's key",
                parse(&lower.pem, &other.key, &root.pem, chain),
                "do not belong together",
            ),
            ("no key", parse(&lower.pem, "", &root.pem, chain), "private key"),
            (
                "no certificate",
                parse("", &lower.key, &root.pem, chain),
                "no certificate",
            ),
            (
                "no root",
                parse(&lower.pem, &lower.key, "", chain),
                "root-cert.pem has no certificate",
            ),
            (
                "another root",
                parse(&lower.pem, &lower.key, &other.pem, chain),
                "has signed",
            ),
            (
                "no chain",
                parse(&lower.pem, &lower.key, &root.pem, None),
                "has signed CN=lower",
            ),
            (
                "no root's",
                parse(&lower.pem, &lower.key, &upper.pem, None),
                "is no root",
            ),
            ("an old one", parse(&old.pem, &old.key, &root.pem, None), "has expired"),
            (
                "an old root",
                parse(&old_root.pem, &old_root.key, &old_root.pem, None),
                "has expired",
            ),
            (
                "a leaf",
                parse(&leaf.pem, &leaf.key, &root.pem, None),
                "not an authority's",
            ),
            (
                "cut off",
                parse(&lower.pem[..200], &lower.key, &root.pem, chain),
                "cut off",
            ),
        ] {
            let Err(said) = result else { panic!("{what} was taken") };
            assert!(said.contains(reason), "{what}: {said}");
        }
        let early = SystemTime::now() - Duration::from_secs(60 * 24 * 60 * 60);
        let early = Provided::parse(
            lower.pem.as_bytes(),
            lower.key.as_bytes(),
            root.pem.as_bytes(),
            None,
            early,
        );
        assert!(early.is_err_and(|said| said.contains("not valid yet")));
    }
}
