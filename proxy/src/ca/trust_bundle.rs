//! The roots as a ClusterTrustBundle, from which kubelets project them into pods, where the API server has that kind.

use std::sync::Arc;
use std::time::Duration;

use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;

use super::cluster::{ClusterError, api_error, is_conflict};

/// The versions of the kind, the latest first: that which Kubernetes 1.37 has by default, and that which 1.33 has on demand.
const VERSIONS: [&str; 2] = ["v1", "v1beta1"];

/// How often it is looked whether somebody has changed it.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// After a failure; an API server that does not know the kind may be upgraded.
const RETRY: Duration = Duration::from_secs(30);

/// A ClusterTrustBundle with the roots.
pub(super) struct TrustBundle {
    client: Client,
    name: String,
    roots: watch::Receiver<Arc<str>>,
}

impl TrustBundle {
    pub(super) fn new(client: Client, name: &str, roots: watch::Receiver<Arc<str>>) -> Self {
        Self {
            client,
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
        let mut result = Ok(());
        for version in VERSIONS {
            result = self.publish_as(version, pem).await;
            // Even an object that is to be made is not found where the kind is not.
            let unknown = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.code == 404);
            if !result.as_ref().is_err_and(unknown) {
                break;
            }
        }
        match result {
            // Another replica was faster: it is looked at again.
            Err(error) if is_conflict(&error) => Ok(()),
            result => result.map_err(api_error("publish", &place)),
        }
    }

    async fn publish_as(&self, version: &str, pem: &str) -> Result<(), kube::Error> {
        let kind = GroupVersionKind::gvk("certificates.k8s.io", version, "ClusterTrustBundle");
        let kind = ApiResource::from_gvk_with_plural(&kind, "clustertrustbundles");
        let api = Api::<DynamicObject>::all_with(self.client.clone(), &kind);
        let parameters = PostParams::default();
        match api.get_opt(&self.name).await? {
            Some(found) if found.data["spec"]["trustBundle"] == pem => return Ok(()),
            Some(mut found) => {
                found.data["spec"]["trustBundle"] = pem.into();
                api.replace(&self.name, &parameters, &found).await?;
            }
            None => {
                let spec = json!({"signerName": signer_of(&self.name), "trustBundle": pem});
                let new = DynamicObject::new(&self.name, &kind).data(json!({"spec": spec}));
                api.create(&parameters, &new).await?;
            }
        }
        tracing::info!("wrote the ClusterTrustBundle {} ({version}) with the roots", self.name);
        Ok(())
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
        const PATH: &str = "/apis/certificates.k8s.io/v1/clustertrustbundles/mesh.adit:ca:roots";
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
