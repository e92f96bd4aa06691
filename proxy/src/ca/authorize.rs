//! Who may have which identity: a pure decision.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::token::Caller;
use crate::identity::{SpiffeError, SpiffeId, TrustDomain};

/// The CA's own knowledge of where workloads run.
pub trait Placement: Send + Sync {
    /// Whether some workload of `identity` runs on `node`.
    fn runs_on(&self, identity: &SpiffeId, node: &str) -> bool;
}

/// A Kubernetes service account, written `<namespace>/<name>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServiceAccount {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl FromStr for ServiceAccount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => Ok(Self {
                namespace: namespace.into(),
                name: name.into(),
            }),
            _ => Err(format!(
                "{text:?} is not a service account of the form <namespace>/<name>"
            )),
        }
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why an authenticated caller does not get what it asks for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Only node proxies may ask for others' identities.
    #[error("the service account {0} is not a node proxy's")]
    NotNodeProxy(ServiceAccount),
    /// The token could have been copied off its pod.
    #[error("the caller's token is not bound to a pod")]
    NotBoundToPod,
    /// Without a node the placement cannot be checked.
    #[error("the caller's token is not bound to a node")]
    NotBoundToNode,
    /// The request names nobody.
    #[error("the request names no identity under ImpersonatedIdentity")]
    NoIdentity,
    /// The request's identity does not parse.
    #[error("the identity asked for does not parse: {0}")]
    BadIdentity(#[from] SpiffeError),
    /// The identity belongs to another authority.
    #[error("{identity} is not of the trust domain {trust_domain}")]
    ForeignTrustDomain {
        /// What was asked for.
        identity: SpiffeId,
        /// What this CA signs for.
        trust_domain: TrustDomain,
    },
    /// No such pod there.
    #[error("no workload of {identity} runs on the node {node}")]
    NotOnNode {
        /// What was asked for.
        identity: SpiffeId,
        /// The caller's node.
        node: String,
    },
}

/// What the decision goes by beside caller and request.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) trust_domain: TrustDomain,
    pub(super) node_proxies: Vec<ServiceAccount>,
}

/// Decides whether `caller` may have a certificate for the identity that it asks for.
pub(super) fn authorize(
    rules: &Rules,
    caller: &Caller,
    requested: Option<&str>,
    placement: &dyn Placement,
) -> Result<SpiffeId, Refusal> {
    if !rules.node_proxies.contains(&caller.account) {
        return Err(Refusal::NotNodeProxy(caller.account.clone()));
    }
    if caller.pod.is_none() {
        return Err(Refusal::NotBoundToPod);
    }
    let node = caller.node.as_ref().ok_or(Refusal::NotBoundToNode)?;
    let identity = SpiffeId::parse(requested.ok_or(Refusal::NoIdentity)?)?;
    if identity.trust_domain() != rules.trust_domain.as_str() {
        return Err(Refusal::ForeignTrustDomain {
            identity,
            trust_domain: rules.trust_domain.clone(),
        });
    }
    if !placement.runs_on(&identity, &node.name) {
        return Err(Refusal::NotOnNode {
            identity,
            node: node.name.clone(),
        });
    }
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::token::Bound;

    const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";

    struct CartOnOne;

    impl Placement for CartOnOne {
        fn runs_on(&self, identity: &SpiffeId, node: &str) -> bool {
            identity.as_str() == CART && node == "one"
        }
    }

    fn caller(account: &str, pod: Option<&str>, node: Option<&str>) -> Caller {
        let bound = |name: &str| Bound {
            name: name.into(),
            uid: "1".into(),
        };
        Caller {
            account: account.parse().unwrap(),
            pod: pod.map(bound),
            node: node.map(bound),
        }
    }

    #[test]
    fn only_the_node_proxy_gets_only_what_runs_on_its_node() {
        let rules = Rules {
            trust_domain: TrustDomain::parse("cluster.local").unwrap(),
            node_proxies: vec!["adit-system/adit".parse().unwrap()],
        };
        let adit = || caller("adit-system/adit", Some("adit-x"), Some("one"));
        let id = |text: &str| SpiffeId::parse(text).unwrap();
        let till = "spiffe://cluster.local/ns/shop/sa/till";
        let foreign = "spiffe://elsewhere/ns/shop/sa/cart";
        for (caller, requested, expected) in [
            (adit(), Some(CART), Ok(id(CART))),
            (
                adit(),
                Some(till),
                Err(Refusal::NotOnNode {
                    identity: id(till),
                    node: "one".into(),
                }),
            ),
            (
                caller("adit-system/adit", Some("adit-y"), Some("two")),
                Some(CART),
                Err(Refusal::NotOnNode {
                    identity: id(CART),
                    node: "two".into(),
                }),
            ),
            (
                caller("shop/cart", Some("cart-x"), Some("one")),
                Some(CART),
                Err(Refusal::NotNodeProxy("shop/cart".parse().unwrap())),
            ),
            (
                caller("adit/adit-system", Some("adit-x"), Some("one")),
                Some(CART),
                Err(Refusal::NotNodeProxy("adit/adit-system".parse().unwrap())),
            ),
            (
                caller("adit-system/adit", None, Some("one")),
                Some(CART),
                Err(Refusal::NotBoundToPod),
            ),
            (
                caller("adit-system/adit", Some("adit-x"), None),
                Some(CART),
                Err(Refusal::NotBoundToNode),
            ),
            (adit(), None, Err(Refusal::NoIdentity)),
            (adit(), Some(""), Err(Refusal::BadIdentity(SpiffeError::Scheme))),
            (
                adit(),
                Some("spiffe://cluster.local/ns/shop"),
                Err(Refusal::BadIdentity(SpiffeError::Path)),
            ),
            (
                adit(),
                Some(foreign),
                Err(Refusal::ForeignTrustDomain {
                    identity: id(foreign),
                    trust_domain: rules.trust_domain.clone(),
                }),
            ),
        ] {
            assert_eq!(
                authorize(&rules, &caller, requested, &CartOnOne),
                expected,
                "{caller:?} {requested:?}"
            );
        }
    }

    #[test]
    fn malformed_service_accounts_are_refused() {
        for text in ["", "a", "/", "a/", "/b", "a/b/c"] {
            assert!(text.parse::<ServiceAccount>().is_err(), "{text}");
        }
    }
}
