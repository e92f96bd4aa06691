//! What peers are verified against, as flags say.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use thiserror::Error;

use super::settings::SettingsError;
use crate::identity::{CrlPolicy, TrustDomain, TrustSettings};

const HEADING: &str = "Trust";

/// A trust domain and the file of its roots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DomainBundle {
    /// Whose roots they are.
    pub(super) domain: TrustDomain,
    /// Where they are.
    pub(super) file: PathBuf,
}

/// Why that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum DomainBundleError {
    /// There is no `=`, or nothing after it.
    #[error("a trust domain and a file of its roots, such as other.example=/etc/adit/other.pem")]
    Form,
    /// The trust domain is none.
    #[error(transparent)]
    Domain(#[from] crate::identity::SpiffeError),
}

impl FromStr for DomainBundle {
    type Err = DomainBundleError;

    fn from_str(text: &str) -> Result<Self, DomainBundleError> {
        let (domain, file) = text.split_once('=').ok_or(DomainBundleError::Form)?;
        if file.is_empty() {
            return Err(DomainBundleError::Form);
        }
        Ok(Self {
            domain: TrustDomain::parse(domain)?,
            file: file.into(),
        })
    }
}

/// The flags about trust.
#[derive(Debug, Clone, Args)]
pub struct TrustArgs {
    /// PEM file of roots that are trusted for this mesh's identities, besides those that the authority names; read again
    /// when it changes. May be given more than once
    #[arg(long, value_name = "FILE", env = "ADIT_TRUST_BUNDLE", help_heading = HEADING, value_delimiter = ',')]
    pub(super) trust_bundle: Vec<PathBuf>,

    /// Another trust domain and the PEM file of its roots: its identities, and none but its own, are accepted from those
    /// who prove them by these roots, and by no others. May be given more than once
    #[arg(long, value_name = "DOMAIN=FILE", env = "ADIT_TRUST_DOMAIN_BUNDLE", help_heading = HEADING,
          value_delimiter = ',')]
    pub(super) trust_domain_bundle: Vec<DomainBundle>,

    /// A further name of this mesh's trust domain, such as one that it had before: who bears it is the same, for peers and
    /// for policies. May be given more than once
    #[arg(long, value_name = "NAME", env = "ADIT_TRUST_DOMAIN_ALIAS", help_heading = HEADING, value_delimiter = ',')]
    pub(super) trust_domain_alias: Vec<TrustDomain>,

    /// File that names compromised roots and other certificates, as PEM or by SHA-256 fingerprint: they count for nothing,
    /// whoever names or has signed them, and open connections that rest on them end. It need not be there
    #[arg(long, value_name = "FILE", env = "ADIT_DISTRUST", help_heading = HEADING)]
    pub(super) distrust: Option<PathBuf>,

    /// Certificate revocation lists: a file, or a folder of files, of one list or more each, in PEM or DER; read again when
    /// they change. May be given more than once
    #[arg(long, value_name = "PATH", env = "ADIT_CRL", help_heading = HEADING, value_delimiter = ',')]
    pub(super) crl: Vec<PathBuf>,

    /// What becomes of handshakes where no revocation list speaks of a certificate, or only one that is out of date
    #[arg(long, value_name = "POLICY", env = "ADIT_CRL_POLICY", help_heading = HEADING, default_value = "lenient")]
    pub(super) crl_policy: CrlPolicy,
}

impl TryFrom<TrustArgs> for TrustSettings {
    type Error = SettingsError;

    fn try_from(args: TrustArgs) -> Result<Self, SettingsError> {
        let foreign: Vec<_> = args
            .trust_domain_bundle
            .into_iter()
            .map(|bundle| (bundle.domain, bundle.file))
            .collect();
        if let Some((domain, _)) = foreign
            .iter()
            .find(|(domain, _)| args.trust_domain_alias.contains(domain))
        {
            return Err(SettingsError::AliasAndForeign(domain.clone()));
        }
        Ok(Self {
            bundles: args.trust_bundle,
            foreign,
            aliases: args.trust_domain_alias,
            distrust: args.distrust,
            crls: args.crl,
            crl_policy: args.crl_policy,
            ..Self::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::SpiffeError;

    #[test]
    fn a_domain_and_its_bundle_are_told_apart() {
        let bundle: DomainBundle = "other.example=/etc/a=b.pem".parse().unwrap();
        assert_eq!(
            (bundle.domain.as_str(), bundle.file.to_str()),
            ("other.example", Some("/etc/a=b.pem"))
        );
        for (text, error) in [
            ("other.example", DomainBundleError::Form),
            ("other.example=", DomainBundleError::Form),
            ("=/etc/a.pem", DomainBundleError::Domain(SpiffeError::TrustDomain)),
            ("Other=/etc/a.pem", DomainBundleError::Domain(SpiffeError::TrustDomain)),
        ] {
            assert_eq!(text.parse::<DomainBundle>(), Err(error), "{text}");
        }
    }
}
