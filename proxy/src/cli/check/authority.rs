//! What is found of the certificate authority, by really asking it for a certificate.

use super::finding::Finding;
use crate::identity::{CaClient, CaSettings, IssueError, Issuer as _, SpiffeId, TrustDomain};

/// Namespace and account of an identity that nobody has.
const NOBODY: &str = "adit-check";

/// What came of asking for a certificate.
#[derive(Debug)]
pub(super) struct AuthorityFacts {
    pub(super) address: String,
    /// Of a pod of this node; none where an identity was asked for that nobody has.
    pub(super) identity: Option<String>,
    pub(super) answer: Result<(), IssueError>,
}

/// Asks for a certificate of `identity`, and throws it away; where there is none, for one that is not to be granted.
pub(super) async fn ask(
    settings: CaSettings,
    identity: Option<&str>,
    trust_domain: &TrustDomain,
) -> Result<AuthorityFacts, String> {
    let address = settings.address.clone();
    let id = match identity {
        Some(identity) => SpiffeId::parse(identity),
        None => SpiffeId::new(trust_domain, NOBODY, NOBODY),
    };
    let id = id.map_err(|error| error.to_string())?;
    let client = CaClient::new(settings).map_err(|error| error.to_string())?;
    let answer = client.issue(&id).await;
    Ok(AuthorityFacts {
        address,
        identity: identity.map(str::to_owned),
        answer: answer.map(drop),
    })
}

/// `None`: which authority is not known here.
pub(super) fn authority(facts: Option<&Result<AuthorityFacts, String>>) -> Finding {
    const NAME: &str = "authority";
    let facts = match facts {
        None => {
            let advice = "give --ca-address, --ca-root and --ca-token as `adit node` has them";
            return Finding::warning(NAME, "not asked: its address or root is not given", advice);
        }
        Some(Err(error)) => return Finding::failed(NAME, error, "give them as `adit node` has them"),
        Some(Ok(facts)) => facts,
    };
    let address = &facts.address;
    match (&facts.answer, &facts.identity) {
        (Ok(()), Some(identity)) => Finding::ok(NAME, format!("{address} takes our token and grants {identity}")),
        (Ok(()), None) => Finding::warning(
            NAME,
            format!("{address} takes our token, and grants an identity that no pod has"),
            "see to it that it grants a node the identities of its own pods only",
        ),
        (Err(IssueError::PermissionDenied { reason, .. } | IssueError::Rejected { reason, .. }), None) => Finding::ok(
            NAME,
            format!("{address} takes our token; for nobody's identity it says: {reason}"),
        ),
        (Err(error), _) => Finding::failed(NAME, error.to_string(), advice(error)),
    }
}

fn advice(error: &IssueError) -> &'static str {
    match error {
        IssueError::Unauthenticated { .. } => {
            "see that --ca-token is this node's own, not expired, and for an audience that the authority takes"
        }
        IssueError::PermissionDenied { .. } | IssueError::Rejected { .. } => {
            "see the authority's log: is this service account among its --node-proxy (istiod: CA_TRUSTED_NODE_ACCOUNTS), \
             and does it know this node's pods?"
        }
        IssueError::Unavailable { .. } | IssueError::Deadline { .. } => {
            "does it run (kubectl -n adit-system get pods -l app.kubernetes.io/component=ca), is it reached from here under \
             --ca-address, and does its certificate chain to --ca-root?"
        }
        IssueError::File { .. } => {
            "see that the file is there: the authority publishes its root when it first starts, the kubelet writes the token"
        }
        _ => "see that --ca-address is a certificate authority of the mesh",
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn only_a_grant_or_the_refusal_of_nobodys_identity_is_well() {
        let told = || ("ca".to_owned(), "no".to_owned());
        let denied = || {
            let (ca, reason) = told();
            IssueError::PermissionDenied { ca, reason }
        };
        let unauthenticated = || {
            let (ca, reason) = told();
            IssueError::Unauthenticated { ca, reason }
        };
        let unavailable = || {
            let (ca, reason) = told();
            IssueError::Unavailable { ca, reason }
        };
        for (answer, pods, level) in [
            (Ok(()), true, Level::Ok),
            (Ok(()), false, Level::Warning),
            (Err(denied()), true, Level::Failed),
            (Err(denied()), false, Level::Ok),
            (Err(unauthenticated()), true, Level::Failed),
            (Err(unauthenticated()), false, Level::Failed),
            (Err(unavailable()), false, Level::Failed),
        ] {
            let finding = authority(Some(&Ok(AuthorityFacts {
                address: "https://ca:1".to_owned(),
                identity: pods.then(|| "spiffe://x/ns/a/sa/b".to_owned()),
                answer,
            })));
            assert_eq!(finding.level, level, "{finding:?}");
            assert_eq!(finding.advice.is_some(), level != Level::Ok);
        }
        assert_eq!(authority(None).level, Level::Warning);
        assert_eq!(authority(Some(&Err("bad".to_owned()))).level, Level::Failed);
    }
}
