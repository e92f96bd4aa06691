//! The roots as a ClusterTrustBundle, from which kubelets project them into pods, where the API server has that kind.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, ClusterTrustBundleSpec};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;

use super::cluster::{ClusterError, api_error, is_conflict};

/// How often it is looked whether somebody has changed it.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// After a failure; an API server that does not know the kind may be upgraded.
const RETRY: Duration = Duration::from_secs(30);

/// A ClusterTrustBundle with the roots.
pub(super) struct TrustBundle {
    api: Api<ClusterTrustBundle>,
    name: String,
    roots: watch::Receiver<Arc<str>>,
}

impl TrustBundle {
    pub(super) fn new(client: Client, name: &str, roots: watch::Receiver<Arc<str>>) -> Self {
        Self {
            api: Api::all(client),
            name: name.into(),
            roots,
        }
    }

    /// Publishes the roots, and again whenever they change or somebody has changed them.
    pub(super) async fn keep(mut self) {
        let mut complained = String::new();
        loop {
            let pem = self.roots.borrow_and_update().clone();
            let pause = match self.publish(&pem).await {
                Ok(()) => {
                    complained.clear();
                    LOOK_EVERY
                }
                Err(error) => {
                    let said = error.to_string();
                    if said != complained {
                        tracing::warn!(%error, "cannot publish the roots as a ClusterTrustBundle");
                        complained = said;
                    }
                    RETRY
                }
            };
            // An error means that the authority is gone.
            if let Ok(Err(_)) = tokio::time::timeout(pause, self.roots.changed()).await {
                return;
            }
        }
    }

    async fn publish(&self, pem: &str) -> Result<(), ClusterError> {
        let place = format!("the ClusterTrustBundle {}", self.name);
        let found = self.api.get_opt(&self.name).await.map_err(api_error("read", &place))?;
        let parameters = PostParams::default();
        let written = match found {
            Some(found) if found.spec.trust_bundle == pem => return Ok(()),
            Some(mut found) => {
                found.spec.trust_bundle = pem.into();
                self.api.replace(&self.name, &parameters, &found).await
            }
            None => {
                let new = ClusterTrustBundle {
                    metadata: ObjectMeta {
                        name: Some(self.name.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: ClusterTrustBundleSpec {
                        signer_name: signer_of(&self.name),
                        trust_bundle: pem.into(),
                    },
                };
                self.api.create(&parameters, &new).await
            }
        };
        match written {
            Ok(_) => {
                tracing::info!("wrote {place} with the roots");
                Ok(())
            }
            // Another replica was faster: it is looked at again.
            Err(error) if is_conflict(&error) => Ok(()),
            Err(error) => Err(api_error("write", &place)(error)),
        }
    }
}

/// The signer that a bundle's name begins with, as the API server demands: `example.org:ca:x` is of `example.org/ca`.
fn signer_of(name: &str) -> Option<String> {
    let (signer, _) = name.rsplit_once(':')?;
    Some(signer.replacen(':', "/", 1))
}

#[cfg(test)]
mod tests {
    use super::super::fake_api::FakeApi;
    use super::*;

    #[test]
    fn the_signer_follows_from_the_name() {
        assert_eq!(signer_of("mesh.adit:ca:roots").as_deref(), Some("mesh.adit/ca"));
        assert_eq!(signer_of("adit-roots"), None);
    }

    #[tokio::test]
    async fn the_roots_are_published_and_follow_a_change() {
        const PATH: &str = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles/mesh.adit:ca:roots";
        let api = FakeApi::default();
        let roots = watch::Sender::new(Arc::<str>::from("one"));
        let bundle = TrustBundle::new(api.way().await.client, "mesh.adit:ca:roots", roots.subscribe());
        tokio::spawn(bundle.keep());
        for pem in ["one", "one and two", "two"] {
            roots.send_replace(pem.into());
            let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
            while api.object(PATH).is_none_or(|found| found["spec"]["trustBundle"] != pem) {
                assert!(tokio::time::Instant::now() < deadline, "{pem}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        assert_eq!(api.object(PATH).unwrap()["spec"]["signerName"], "mesh.adit/ca");
    }
}
