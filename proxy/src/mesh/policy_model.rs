//! Authorization policies as data, in the shape that Istio's control plane sends them: a policy has rules (any may
//! match), a rule has clauses (all must match), a clause has matches (any may match). What they decide is `policy`'s.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use serde::Serialize;
use thiserror::Error;

use super::Workload;

/// Which workloads a policy applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Every workload of the mesh.
    Global,
    /// Every workload of the policy's namespace.
    Namespace,
    /// The workloads that list it in [`Workload::policies`].
    Workload,
}

/// What a policy does to a connection that it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Permits it, unless another policy denies it. Where any such policy applies, what none matches is denied.
    Allow,
    /// Denies it, whatever else permits it.
    Deny,
}

impl Action {
    /// The word used in files and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// An authorization policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Policy {
    key: Arc<str>,
    /// Which workloads it applies to.
    pub scope: Scope,
    /// What it does to a connection that it matches.
    pub action: Action,
    /// Whether its decision is only reported, not enforced.
    pub dry_run: bool,
    /// Its rules: it matches where any of them does; without rules it matches nothing.
    pub rules: Vec<Rule>,
}

impl Policy {
    /// A policy that is enforced. The namespace of a global policy may be empty.
    pub fn new(namespace: &str, name: &str, scope: Scope, action: Action, rules: Vec<Rule>) -> Self {
        let key = match namespace {
            "" => name.into(),
            namespace => format!("{namespace}/{name}").into(),
        };
        Self {
            key,
            scope,
            action,
            dry_run: false,
            rules,
        }
    }

    /// The same policy, with its decision only reported.
    #[must_use]
    pub fn dry_run(self) -> Self {
        Self { dry_run: true, ..self }
    }

    /// What it is listed and logged by: `namespace/name`, or `name` alone without a namespace.
    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// Its namespace; empty for a global policy without one.
    pub fn namespace(&self) -> &str {
        self.key.split_once('/').map_or("", |(namespace, _)| namespace)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.key.split_once('/').map_or(&self.key, |(_, name)| name)
    }

    /// Whether it applies to the workload by its scope alone, without being listed.
    fn applies_unlisted(&self, workload: &Workload) -> bool {
        match self.scope {
            Scope::Global => true,
            Scope::Namespace => self.namespace() == &*workload.namespace,
            Scope::Workload => false,
        }
    }
}

/// One rule of a policy: it matches where all of its clauses do, so without clauses always.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Rule {
    /// Its clauses.
    pub clauses: Vec<Clause>,
}

/// One clause of a rule: it matches where any of its matches does, or where it has none.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Clause {
    /// Its matches. One that says nothing is skipped.
    pub matches: Vec<Match>,
}

/// Conditions that must all hold. A list of values holds where any of them matches; a `not_` list where none does; an
/// empty list says nothing. Without a proven identity no value on principals, namespaces or service accounts matches.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[expect(
    missing_docs,
    reason = "the names say it, and the type's documentation how they combine"
)]
pub struct Match {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<StringMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_namespaces: Vec<StringMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub service_accounts: Vec<ServiceAccountMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_service_accounts: Vec<ServiceAccountMatch>,
    /// Compared with the identity without its scheme, `<trust domain>/ns/<namespace>/sa/<service account>`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub principals: Vec<StringMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_principals: Vec<StringMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub source_ips: Vec<IpBlock>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_source_ips: Vec<IpBlock>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub destination_ips: Vec<IpBlock>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_destination_ips: Vec<IpBlock>,
    /// Ports of the pod, not of a service.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub destination_ports: Vec<u16>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_destination_ports: Vec<u16>,
}

impl Match {
    /// Whether it says nothing at all.
    pub fn is_empty(&self) -> bool {
        let Self {
            namespaces,
            not_namespaces,
            service_accounts,
            not_service_accounts,
            principals,
            not_principals,
            source_ips,
            not_source_ips,
            destination_ips,
            not_destination_ips,
            destination_ports,
            not_destination_ports,
        } = self;
        [namespaces, not_namespaces, principals, not_principals]
            .iter()
            .all(|l| l.is_empty())
            && [service_accounts, not_service_accounts].iter().all(|l| l.is_empty())
            && [source_ips, not_source_ips, destination_ips, not_destination_ips]
                .iter()
                .all(|l| l.is_empty())
            && [destination_ports, not_destination_ports].iter().all(|l| l.is_empty())
    }
}

/// A condition on a string. Written `value`, `prefix*`, `*suffix` or `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StringMatch {
    /// Equal.
    Exact(String),
    /// Begins with it.
    Prefix(String),
    /// Ends with it.
    Suffix(String),
    /// Anything that is there and not empty.
    Presence,
}

impl StringMatch {
    /// Whether it holds for the text.
    pub fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(value) => value == text,
            Self::Prefix(value) => text.starts_with(value.as_str()),
            Self::Suffix(value) => text.ends_with(value.as_str()),
            Self::Presence => !text.is_empty(),
        }
    }
}

/// Why a text is no condition on a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum StringMatchError {
    /// It is empty.
    #[error("empty; write a value, `prefix*`, `*suffix`, or `*` for anything present")]
    Empty,
    /// It has a `*` elsewhere than at one end.
    #[error("`*` may stand at the beginning or at the end only, not at both or in between")]
    Star,
}

impl FromStr for StringMatch {
    type Err = StringMatchError;

    fn from_str(text: &str) -> Result<Self, StringMatchError> {
        let (kind, value): (fn(String) -> Self, &str) = if text == "*" {
            return Ok(Self::Presence);
        } else if let Some(prefix) = text.strip_suffix('*') {
            (Self::Prefix, prefix)
        } else if let Some(suffix) = text.strip_prefix('*') {
            (Self::Suffix, suffix)
        } else {
            (Self::Exact, text)
        };
        match value {
            "" => Err(StringMatchError::Empty),
            value if value.contains('*') => Err(StringMatchError::Star),
            value => Ok(kind(value.to_owned())),
        }
    }
}

impl fmt::Display for StringMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(value) => f.write_str(value),
            Self::Prefix(value) => write!(f, "{value}*"),
            Self::Suffix(value) => write!(f, "*{value}"),
            Self::Presence => f.write_str("*"),
        }
    }
}

impl Serialize for StringMatch {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A service account, in any trust domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServiceAccountMatch {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub service_account: String,
}

/// A block of IP addresses. A v4-mapped IPv6 block (`::ffff:a.b.c.d/n`, n from 96) is the IPv4 block that it maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct IpBlock(IpNet);

impl IpBlock {
    /// The block of a network.
    pub fn new(net: IpNet) -> Self {
        let mapped = match net {
            IpNet::V6(v6) if v6.prefix_len() >= 96 => v6
                .addr()
                .to_ipv4_mapped()
                .and_then(|v4| Ipv4Net::new(v4, v6.prefix_len() - 96).ok()),
            _ => None,
        };
        Self(mapped.map_or(net, IpNet::V4))
    }

    /// Whether the address, as it is or mapped, lies in the block. An IPv6 block never holds an IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

/// Why a text is no block of IP addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not an IP address or block; write one like 10.0.0.1, 10.0.0.0/8 or fd00::/8")]
pub struct IpBlockError;

impl FromStr for IpBlock {
    type Err = IpBlockError;

    fn from_str(text: &str) -> Result<Self, IpBlockError> {
        let net = match text.parse::<IpAddr>() {
            Ok(address) => IpNet::from(address),
            Err(_) => text.parse().map_err(|_| IpBlockError)?,
        };
        Ok(Self::new(net))
    }
}

impl fmt::Display for IpBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A policy that applies to a workload.
#[derive(Debug, Clone, Copy)]
pub enum Listed<'a> {
    /// It is known.
    Known(&'a Arc<Policy>),
    /// The workload lists it, but there is none of that name.
    Missing(&'a Arc<str>),
}

/// All policies, found by what they apply to.
#[derive(Debug, Default)]
pub struct PolicySet {
    by_key: HashMap<Arc<str>, Arc<Policy>>,
    global: Vec<Arc<Policy>>,
    by_namespace: HashMap<Box<str>, Vec<Arc<Policy>>>,
}

impl PolicySet {
    /// Indexes the policies. Of two with one key the later counts; [`Mesh::build`](super::Mesh::build) lets that not happen.
    pub fn new(policies: impl IntoIterator<Item = Policy>) -> Self {
        let mut set = Self::default();
        for policy in policies {
            set.by_key.insert(Arc::clone(policy.key()), Arc::new(policy));
        }
        // By key, so that of several policies that decide alike always the same one is named.
        let mut all: Vec<_> = set.by_key.values().cloned().collect();
        all.sort_by(|a, b| a.key().cmp(b.key()));
        for policy in all {
            match policy.scope {
                Scope::Global => set.global.push(policy),
                Scope::Namespace => set
                    .by_namespace
                    .entry(policy.namespace().into())
                    .or_default()
                    .push(policy),
                Scope::Workload => {}
            }
        }
        set
    }

    /// The policy of that key.
    pub fn get(&self, key: &str) -> Option<&Arc<Policy>> {
        self.by_key.get(key)
    }

    /// All policies, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.by_key.values()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// The policies that apply to the workload: global ones, its namespace's, then those it lists, each once.
    pub fn applying<'a>(&'a self, workload: &'a Workload) -> impl Iterator<Item = Listed<'a>> + Clone {
        let namespace = self
            .by_namespace
            .get(&*workload.namespace)
            .map_or(&[][..], Vec::as_slice);
        let listed = workload.policies.iter().filter_map(|key| match self.by_key.get(key) {
            None => Some(Listed::Missing(key)),
            Some(policy) if policy.applies_unlisted(workload) => None,
            Some(policy) => Some(Listed::Known(policy)),
        });
        self.global.iter().chain(namespace).map(Listed::Known).chain(listed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn string_conditions_are_read_and_written_alike() {
        for (text, expected) in [
            ("a", StringMatch::Exact("a".into())),
            ("a*", StringMatch::Prefix("a".into())),
            ("*a", StringMatch::Suffix("a".into())),
            ("*", StringMatch::Presence),
        ] {
            let parsed: StringMatch = text.parse().unwrap();
            assert_eq!(parsed, expected);
            assert_eq!(parsed.to_string(), text);
        }
        for (text, reason) in [
            ("", StringMatchError::Empty),
            ("**", StringMatchError::Star),
            ("*a*", StringMatchError::Star),
            ("a*b", StringMatchError::Star),
        ] {
            assert_eq!(text.parse::<StringMatch>(), Err(reason), "{text}");
        }
    }

    #[test]
    fn mapped_addresses_and_blocks_are_ipv4() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        for (block, address, inside) in [
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "::ffff:10.1.2.3", true),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("10.0.0.7/24", "10.0.0.9", true),
            ("fd00::/8", "fd00::1", true),
            ("::/0", "10.0.0.1", false),
            ("0.0.0.0/0", "fd00::1", false),
            ("0.0.0.0/0", "::ffff:1.2.3.4", true),
        ] {
            assert_eq!(
                block.parse::<IpBlock>().unwrap().contains(ip(address)),
                inside,
                "{address} in {block}"
            );
        }
        for text in [
            "",
            "10.0.0.0/33",
            "10.0.0",
            "fd00::/129",
            "10.0.0.0/-1",
            "localhost",
            "10.0.0.0/8 ",
        ] {
            assert_eq!(text.parse::<IpBlock>(), Err(IpBlockError), "{text}");
        }
    }

    #[test]
    fn a_policy_is_named_by_namespace_and_name() {
        let policy = Policy::new("shop", "cart", Scope::Namespace, Action::Allow, Vec::new());
        assert_eq!(
            (&**policy.key(), policy.namespace(), policy.name()),
            ("shop/cart", "shop", "cart")
        );
        let global = Policy::new("", "all", Scope::Global, Action::Deny, Vec::new());
        assert_eq!((&**global.key(), global.namespace(), global.name()), ("all", "", "all"));
    }
}
