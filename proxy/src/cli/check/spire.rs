//! What is found of the node's SPIRE agent, by really asking it for a certificate.

use super::finding::Finding;
use crate::identity::{IssueError, Issuer as _, SpiffeId, SpireAgent, SpireSettings, Trust, TrustDomain};

const NAME: &str = "spire";
/// Namespace and account of an identity that nobody has.
const NOBODY: &str = "adit-check";

/// Asks for a certificate of `identity`, and throws it away; where there is none, for one that nobody has.
pub(super) async fn ask(socket: &str, identity: Option<&str>, trust_domain: &TrustDomain) -> Finding {
    let id = match identity {
        Some(identity) => SpiffeId::parse(identity),
        None => SpiffeId::new(trust_domain, NOBODY, NOBODY),
    };
    let id = match id {
        Ok(id) => id,
        Err(error) => return Finding::failed(NAME, error.to_string(), "see the agent's state: /debug/state"),
    };
    let settings = SpireSettings {
        socket: socket.to_owned(),
        home: TrustDomain::parse(id.trust_domain()).unwrap_or_else(|_| trust_domain.clone()),
        deadline: SpireSettings::DEADLINE,
    };
    match SpireAgent::start(&settings, Trust::default()) {
        Ok(agent) => {
            let answer = agent.issue(&id).await.map(drop);
            finding(&agent.describe(), identity, answer)
        }
        Err(error) => Finding::failed(NAME, error.to_string(), "give --spire-socket as `adit node` has it"),
    }
}

fn finding(agent: &str, identity: Option<&str>, answer: Result<(), IssueError>) -> Finding {
    match (answer, identity) {
        (Ok(()), Some(identity)) => Finding::ok(NAME, format!("{agent} takes us for a delegate and grants {identity}")),
        (Err(IssueError::NoEntry { .. }), None) => Finding::ok(NAME, format!("{agent} takes us for a delegate")),
        (Ok(()), None) => Finding::warning(
            NAME,
            format!("{agent} grants an identity that no pod has"),
            "see to it that entries have the selectors of a namespace and a service account",
        ),
        (Err(error), _) => Finding::failed(
            NAME,
            error.to_string(),
            "docs/install.md, \"With SPIRE\", tells what the agent's configuration and the entries need",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn only_a_grant_or_the_lack_of_nobodys_entry_is_well() {
        let pod = "spiffe://x.example/ns/a/sa/b";
        let (ca, reason) = (|| "the agent".to_owned(), || "no".to_owned());
        let no_entry = || IssueError::NoEntry {
            ca: ca(),
            id: SpiffeId::parse(pod).unwrap(),
            reason: reason(),
        };
        let stranger = || IssueError::NotDelegate {
            ca: ca(),
            reason: reason(),
        };
        for (answer, identity, level) in [
            (Ok(()), Some(pod), Level::Ok),
            (Ok(()), None, Level::Warning),
            (Err(no_entry()), Some(pod), Level::Failed),
            (Err(no_entry()), None, Level::Ok),
            (Err(stranger()), None, Level::Failed),
        ] {
            let finding = finding("the agent", identity, answer);
            assert_eq!(finding.level, level, "{finding:?}");
        }
    }
}
