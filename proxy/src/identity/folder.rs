//! Certificates from files that another system keeps fresh: one folder for each identity.

use std::path::{Path, PathBuf};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use zeroize::Zeroizing;

use super::ca::{file_error, read_bounded};
use super::chain::MAX_CHAIN_BYTES;
use super::{BoxFuture, Certificate, IssueError, Issued, Issuer, PrivateKey, SpiffeId};

/// The names of `kubernetes.io/tls` Secrets, by which most systems mount certificates.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const ROOTS: &str = "ca.crt";
/// The largest key file read.
const MAX_KEY_BYTES: u64 = 16 * 1024;

/// Takes certificates from `FOLDER/NAMESPACE/SERVICE-ACCOUNT/{tls.crt,tls.key,ca.crt}`: the leaf and its intermediates,
/// its key, and the roots. They are read again when the store renews, at half of a certificate's life, and once a minute
/// from then on until newer ones are there.
pub struct CertificateFolder(PathBuf);

impl CertificateFolder {
    /// Nothing is read before the first certificate is needed.
    pub fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    async fn read(&self, id: &SpiffeId) -> Result<Certificate, IssueError> {
        // Neither can be other than one name of a folder: an identity has no dots alone and no slashes in its parts.
        let folder = self.0.join(id.namespace()).join(id.service_account());
        let limit = MAX_CHAIN_BYTES as u64;
        let chain = read_bounded("certificate", &folder.join(CERTIFICATE), limit).await?;
        let roots = read_bounded("root file", &folder.join(ROOTS), limit).await?;
        let path = folder.join(KEY);
        let key = Zeroizing::new(read_bounded("private key", &path, MAX_KEY_BYTES).await?);
        let key = PrivateKey::from_pem(&key).map_err(|reason| file_error("private key", &path, &reason.to_string()))?;
        let answer = answer(&folder, &chain, roots)?;
        Certificate::new(id, &answer, key).map_err(|reason| IssueError::Answer {
            ca: format!("the folder {}", folder.display()),
            reason,
        })
    }
}

/// In the layout of a CA's answer: a certificate in a string, the roots together in the last.
fn answer(folder: &Path, chain: &[u8], roots: Vec<u8>) -> Result<Vec<String>, IssueError> {
    let path = folder.join(CERTIFICATE);
    let unusable = |reason: &str| file_error("certificate", &path, reason);
    let certificates = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| unusable(&error.to_string()))?;
    if certificates.is_empty() {
        return Err(unusable("it has no CERTIFICATE block"));
    }
    let chain = str::from_utf8(chain).map_err(|_| unusable("it is not text"))?;
    let path = folder.join(ROOTS);
    let roots = String::from_utf8(roots).map_err(|_| file_error("root file", &path, "it is not text"))?;
    Ok(vec![chain.to_owned(), roots])
}

impl Issuer for CertificateFolder {
    fn issue<'a>(&'a self, id: &'a SpiffeId) -> BoxFuture<'a, Result<Issued, IssueError>> {
        Box::pin(async move { self.read(id).await.map(Issued::from) })
    }

    fn describe(&self) -> String {
        format!("the folder {}", self.0.display())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::{Duration, SystemTime};

    use super::super::CallOutcome;
    use super::super::testing::{LeafOptions, TestCa, id};
    use super::*;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        let folder = folder.join("shop/cart");
        fs::create_dir_all(&folder).unwrap();
        for (name, content) in files {
            fs::write(folder.join(name), content).unwrap();
        }
    }

    #[tokio::test]
    async fn what_is_mounted_is_taken_and_newer_files_too() {
        let (ca, folder) = (TestCa::new(), tempfile::tempdir().unwrap());
        let issuer = CertificateFolder::new(folder.path().to_owned());
        let mut serials = Vec::new();
        for _ in 0..2 {
            let (chain, key) = ca.issue(&id("shop", "cart"));
            let certificate = chain[..2].concat();
            write(
                folder.path(),
                &[(CERTIFICATE, &certificate), (ROOTS, &chain[2]), (KEY, &key.to_pem())],
            );
            let issued = issuer.issue(&id("shop", "cart")).await.unwrap();
            serials.push(issued.certificate.serial().to_string());
        }
        assert_ne!(serials[0], serials[1]);
    }

    #[tokio::test]
    async fn what_is_missing_or_wrong_is_named() {
        let (ca, folder) = (TestCa::new(), tempfile::tempdir().unwrap());
        let issuer = CertificateFolder::new(folder.path().to_owned());
        let (chain, key) = ca.issue(&id("shop", "cart"));
        let (others_chain, others_key) = ca.issue(&id("shop", "admin"));
        let now = SystemTime::now();
        let (old_chain, old_key) = ca.issue_with(
            &id("shop", "cart"),
            LeafOptions {
                not_before: now - Duration::from_secs(60),
                not_after: now - Duration::from_secs(1),
                ..LeafOptions::default()
            },
        );
        let (chain, roots) = (chain[..2].concat(), chain[2].clone());
        let (key, others_key, old_key) = (key.to_pem(), others_key.to_pem(), old_key.to_pem());
        let (others, old) = (others_chain[..2].concat(), old_chain[..2].concat());
        for (certificate, roots, key, outcome, says) in [
            (None, &*roots, &*key, CallOutcome::Local, "tls.crt: No such file"),
            (Some(""), &roots, &key, CallOutcome::Local, "no CERTIFICATE block"),
            (
                Some("\u{0}garbage"),
                &roots,
                &key,
                CallOutcome::Local,
                "no CERTIFICATE block",
            ),
            (Some(&chain), "", &key, CallOutcome::BadAnswer, "not a PEM certificate"),
            (Some(&chain), &roots, "", CallOutcome::Local, "tls.key"),
            (Some(&chain), &roots, &roots, CallOutcome::Local, "tls.key"),
            (Some(&chain), &roots, &others_key, CallOutcome::BadAnswer, "another key"),
            (
                Some(&others),
                &roots,
                &others_key,
                CallOutcome::BadAnswer,
                "admin's, not",
            ),
            (Some(&old), &roots, &old_key, CallOutcome::BadAnswer, "has expired"),
        ] {
            write(folder.path(), &[(ROOTS, roots), (KEY, key)]);
            if let Some(certificate) = certificate {
                write(folder.path(), &[(CERTIFICATE, certificate)]);
            }
            let error = issuer.read(&id("shop", "cart")).await.unwrap_err();
            assert!(error.to_string().contains(says), "{says}: {error}");
            assert_eq!(error.outcome(), outcome, "{error}");
            assert!(!error.to_string().contains("PRIVATE"), "{error}");
        }
    }
}
