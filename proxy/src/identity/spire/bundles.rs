//! The bundles of a SPIRE agent: which roots it has of which trust domain, followed for as long as the proxy runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::proto::{SubscribeToX509BundlesRequest, SubscribeToX509BundlesResponse};
use super::socket::AdminSocket;
use crate::identity::chain::{split_der, usable_roots};
use crate::identity::trust::Root;
use crate::identity::{CertificateError, IssueError, Trust, TrustDomain};

/// The most bytes of all bundles together.
const MAX_BYTES: usize = 1024 * 1024;
/// After that the agent is asked anew: while it answers, it tells of bundles that have come or changed, but not of trust
/// domains that nothing is federated with any more (SPIRE 1.13, `SubscribeToX509Bundles`).
const ASK_ANEW: Duration = Duration::from_secs(300);
/// Between a failure and the next attempt.
const PAUSE: Duration = Duration::from_secs(1);

/// What the agent has said of bundles. Clones are one.
#[derive(Clone)]
pub(super) struct Bundles {
    socket: Arc<AdminSocket>,
    home: TrustDomain,
    trust: Trust,
    told: watch::Sender<Told>,
}

#[derive(Clone, Default)]
struct Told {
    /// The last good bundle of our own trust domain.
    home: Option<Arc<[CertificateDer<'static>]>>,
    /// Why the latest attempt to learn of bundles has failed.
    fault: Option<IssueError>,
}

impl Bundles {
    pub(super) fn new(socket: Arc<AdminSocket>, home: TrustDomain, trust: Trust) -> Self {
        Self {
            socket,
            home,
            trust,
            told: watch::Sender::default(),
        }
    }

    /// The roots of our own trust domain, once the agent has told of them; or why it does not.
    pub(super) async fn home(&self) -> Result<Arc<[CertificateDer<'static>]>, IssueError> {
        let mut told = self.told.subscribe();
        // The sender is ours.
        let known = told.wait_for(|told| told.home.is_some() || told.fault.is_some()).await;
        let told = known.map_err(|_| self.socket.ended())?.clone();
        match (told.home, told.fault) {
            (Some(roots), _) => Ok(roots),
            (None, fault) => Err(fault.unwrap_or_else(|| self.socket.ended())),
        }
    }

    /// Follows the agent's bundles, for ever.
    pub(super) async fn follow(self) {
        loop {
            if let Err(fault) = self.listen().await {
                self.failed(fault);
                sleep(PAUSE).await;
            }
        }
    }

    /// Takes in what the agent tells, until it is to be asked anew.
    async fn listen(&self) -> Result<(), IssueError> {
        let asked = Instant::now();
        let failed = |status| self.socket.failure(&status);
        let first = async {
            let mut client = self.socket.client().max_decoding_message_size(MAX_BYTES);
            let updates = client.subscribe_to_x509_bundles(SubscribeToX509BundlesRequest {}).await;
            let mut updates = updates.map_err(failed)?.into_inner();
            let update = updates.message().await.map_err(failed)?;
            Ok((update, updates))
        };
        let (mut update, mut updates) = self.socket.in_time(first).await?;
        loop {
            self.take(update.ok_or_else(|| self.socket.ended())?);
            match timeout_at(asked + ASK_ANEW, updates.message()).await {
                Ok(next) => update = next.map_err(failed)?,
                Err(_) => return Ok(()),
            }
        }
    }

    fn take(&self, update: SubscribeToX509BundlesResponse) {
        let mut bundles = self.parse(update.ca_certificates);
        let home = bundles.remove(&self.home);
        let mut names: Vec<String> = bundles.keys().map(ToString::to_string).collect();
        names.sort();
        let others = bundles.into_iter().filter_map(|(domain, bundle)| match bundle {
            Ok((_, roots)) => Some((domain, roots)),
            Err(error) => {
                tracing::error!(
                    "the bundle of {domain} that {} has cannot be used: {error}",
                    self.socket
                );
                None
            }
        });
        let mut others: Vec<_> = others.collect();
        others.sort_by(|(one, _), (other, _)| one.as_str().cmp(other.as_str()));
        self.trust.federate(others);
        match home {
            Some(Ok((certificates, roots))) => {
                // Trusted before anybody can ask for a certificate that rests on them. For how long certificates live,
                // they say themselves.
                self.trust.learn(&roots, Duration::ZERO);
                let before = self.told.send_replace(Told {
                    home: Some(certificates.into()),
                    fault: None,
                });
                if before.fault.is_some() {
                    tracing::info!("{} tells of bundles again", self.socket);
                }
            }
            Some(Err(reason)) => self.failed(IssueError::Answer {
                ca: self.socket.to_string(),
                reason,
            }),
            None => self.failed(IssueError::NoBundle {
                ca: self.socket.to_string(),
                domain: self.home.to_string(),
                known: if names.is_empty() {
                    "none".to_owned()
                } else {
                    names.join(", ")
                },
            }),
        }
    }

    fn parse(&self, bundles: HashMap<String, Vec<u8>>) -> HashMap<TrustDomain, Bundle> {
        let mut all = HashMap::new();
        for (name, der) in bundles {
            match TrustDomain::parse(name.strip_prefix("spiffe://").unwrap_or(&name)) {
                Ok(domain) => drop(all.insert(domain, parse(&der))),
                Err(error) => tracing::error!("{} has a bundle of {name:?}: {error}", self.socket),
            }
        }
        all
    }

    /// What is known stays in force.
    fn failed(&self, fault: IssueError) {
        self.told.send_modify(|told| {
            if told.fault.as_ref() != Some(&fault) {
                tracing::warn!("the roots of the mesh's trust domain are not followed: {fault}");
            }
            told.fault = Some(fault);
        });
    }
}

type Bundle = Result<(Vec<CertificateDer<'static>>, Vec<Root>), CertificateError>;

fn parse(der: &[u8]) -> Bundle {
    let certificates = split_der(der)?;
    let roots = usable_roots(&certificates)?;
    Ok((certificates, roots))
}
