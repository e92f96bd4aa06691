//! What is shown of trust.

use std::time::SystemTime;

use serde::Serialize;

/// Where a root is known from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RootSource {
    /// The end of the CA's answers, or the bundles of a SPIRE agent.
    Ca,
    /// A bundle file.
    File,
}

impl RootSource {
    /// Every source.
    pub const ALL: [Self; 2] = [Self::Ca, Self::File];

    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ca => "ca",
            Self::File => "file",
        }
    }
}

/// One root.
#[derive(Debug, Clone, Serialize)]
pub struct RootStatus {
    /// Whose identities it vouches for; none for our own trust domain.
    pub trust_domain: Option<String>,
    /// SHA-256 of the certificate, lower-case hexadecimal.
    pub fingerprint: String,
    /// Its subject.
    pub subject: String,
    /// Since when it is valid.
    pub not_before: SystemTime,
    /// When it expires.
    pub not_after: SystemTime,
    /// Where it is known from.
    pub source: RootSource,
    /// Learnt from the CA, whose latest answer names it no more: it goes when nothing signed under it can be valid.
    pub leaving: bool,
    /// Whether handshakes are verified against it. Distrusted and expired ones are not used.
    pub in_force: bool,
}

/// One revocation list.
#[derive(Debug, Clone, Serialize)]
pub struct CrlStatus {
    /// Who has issued it.
    pub issuer: String,
    /// Its own date.
    pub this_update: SystemTime,
    /// When the next one is due.
    pub next_update: Option<SystemTime>,
    /// How many certificates it revokes.
    pub revoked: usize,
}

/// What is trusted now, and what is not.
#[derive(Debug, Clone, Default, Serialize)]
pub struct TrustStatus {
    /// The roots, ours first.
    pub roots: Vec<RootStatus>,
    /// Roots that are no more used for handshakes, on which connections may still rest.
    pub retired: usize,
    /// Further names of our own trust domain.
    pub aliases: Vec<String>,
    /// Fingerprints of what is named as compromised.
    pub distrusted: Vec<String>,
    /// The revocation lists.
    pub crls: Vec<CrlStatus>,
    /// What is asked of them.
    pub crl_policy: &'static str,
    /// Files that cannot be used as they are, and why.
    pub errors: Vec<(String, String)>,
    /// Peers' chains that connections rest on.
    pub peer_chains: usize,
}
