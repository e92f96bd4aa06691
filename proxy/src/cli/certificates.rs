//! The certificates of a node's pods, before anything is carried for them.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use crate::identity::{CertStore, IdentityError, IdentityLease, IdentityState, SpiffeId};
use crate::mesh::MeshHandle;
use crate::node;

/// How long a proxy that takes over waits for its certificates; the one in charge has its own.
const CERTIFICATES_BEFORE_HANDOVER: Duration = Duration::from_secs(15);

/// Gets a certificate for each identity of this node's pods, before any of their connections needs it.
pub(super) async fn fetch_certificates(
    certs: &CertStore,
    node: &str,
    mesh: &MeshHandle,
) -> anyhow::Result<Vec<IdentityLease>> {
    let identities = node::wanted_identities(node, &mesh.load());
    let leases = identities.iter().map(|id| certs.acquire(id)).collect();
    let all = join_all(identities.iter().map(|id| first_certificate(certs, id)));
    timeout(CERTIFICATES_BEFORE_HANDOVER, all).await.map_err(|_| {
        let seconds = CERTIFICATES_BEFORE_HANDOVER.as_secs();
        anyhow::anyhow!("the certificate authority has not issued all certificates within {seconds} s")
    })?;
    Ok(leases)
}

/// Waits until the identity has a certificate, or no pod of it is left; or until the authority refuses it, but has granted
/// another: that concerns its pods, and is to hold up no others. Where it grants none, it may be us whom it refuses.
pub(super) async fn first_certificate(certs: &CertStore, id: &SpiffeId) {
    // Each try waits for a while.
    while let Err(IdentityError::Unavailable { reason, .. }) = certs.expect(id).await {
        let refused = reason.filter(|reason| !reason.is_outage());
        let granted = || certs.snapshot().iter().any(|one| one.state == IdentityState::Valid);
        if let Some(reason) = refused.filter(|_| granted()) {
            tracing::warn!("the connections of pods of {id} fail until it is granted: {reason}");
            return;
        }
    }
}
