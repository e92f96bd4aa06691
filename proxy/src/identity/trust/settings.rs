//! Where trust comes from.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::identity::TrustDomain;

/// What becomes of a handshake whose certificates no revocation list speaks of, or only one that is out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum CrlPolicy {
    /// It goes on. What a list names as revoked is refused, whether or not the list is out of date.
    #[default]
    Lenient,
    /// It is refused, for every certificate of the chain but the root.
    Strict,
}

impl CrlPolicy {
    /// The word used in settings and state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lenient => "lenient",
            Self::Strict => "strict",
        }
    }
}

/// Where roots, and what is not trusted, are learned from besides the CA's answers.
#[derive(Clone)]
pub struct TrustSettings {
    /// Files of roots of our own trust domain.
    pub bundles: Vec<PathBuf>,
    /// Files of roots of others, each with its trust domain.
    pub foreign: Vec<(TrustDomain, PathBuf)>,
    /// Further names of our own trust domain.
    pub aliases: Vec<TrustDomain>,
    /// The list of what is compromised.
    pub distrust: Option<PathBuf>,
    /// Files of revocation lists, or folders of such files.
    pub crls: Vec<PathBuf>,
    /// What is asked of those.
    pub crl_policy: CrlPolicy,
    /// How often it is looked whether files have changed, and whether roots have had their time.
    pub look_every: Duration,
    /// The wall clock.
    pub now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

impl Default for TrustSettings {
    fn default() -> Self {
        Self {
            bundles: Vec::new(),
            foreign: Vec::new(),
            aliases: Vec::new(),
            distrust: None,
            crls: Vec::new(),
            crl_policy: CrlPolicy::default(),
            look_every: Duration::from_secs(2),
            now: Arc::new(SystemTime::now),
        }
    }
}

impl fmt::Debug for TrustSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrustSettings")
            .field("bundles", &self.bundles)
            .field("foreign", &self.foreign)
            .field("aliases", &self.aliases)
            .field("distrust", &self.distrust)
            .field("crls", &self.crls)
            .field("crl_policy", &self.crl_policy)
            .finish_non_exhaustive()
    }
}
