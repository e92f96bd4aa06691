//! `AuthorizationPolicy`, as far as it is about connections.
//!
//! What cannot be honoured never widens access: in a policy that allows, a rule that has anything of the kind never
//! matches, and the policy still stands, so that its scope admits only what other rules permit; in one that denies, the
//! rule matches as if that condition were not there.

use std::str::FromStr;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::object::{Metadata, Object, Selection, present};
use super::report::Finding;
use crate::identity::SpiffeId;
use crate::mesh::{Action, Clause, IpBlock, Match, Policy, Rule, Scope, ServiceAccountMatch, StringMatch};

/// The annotation by which a policy's decision is only reported.
const DRY_RUN: &str = "istio.io/dry-run";

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    /// Read apart, by [`Selection::of`]; named here so that it is not among the others.
    #[serde(rename = "selector")]
    _selector: Option<Value>,
    target_ref: Option<Value>,
    target_refs: Option<Vec<Value>>,
    action: Option<String>,
    /// Belongs to the action `CUSTOM`.
    #[serde(rename = "provider")]
    _provider: Option<Value>,
    rules: Option<Vec<Option<RuleSpec>>>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RuleSpec {
    from: Option<Vec<From>>,
    to: Option<Vec<To>>,
    when: Option<Vec<Condition>>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct From {
    source: Option<Source>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

type Values = Option<Vec<String>>;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Source {
    principals: Values,
    not_principals: Values,
    namespaces: Values,
    not_namespaces: Values,
    service_accounts: Values,
    not_service_accounts: Values,
    trust_domains: Values,
    not_trust_domains: Values,
    ip_blocks: Values,
    not_ip_blocks: Values,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct To {
    operation: Option<Operation>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Operation {
    ports: Values,
    not_ports: Values,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Condition {
    key: String,
    values: Values,
    not_values: Values,
    #[serde(flatten)]
    other: Map<String, Value>,
}

/// What an object says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Converted {
    /// The policy; none where the object has no effect.
    pub(super) policy: Option<Policy>,
    /// Whom it is for, where its scope is that of listed workloads.
    pub(super) selection: Selection,
    pub(super) findings: Vec<Finding>,
    /// What follows of the findings.
    pub(super) effect: Option<&'static str>,
}

/// Converts an object, in a mesh whose policies for everybody live in the root namespace.
pub(super) fn convert(object: &Object, root_namespace: &str) -> Converted {
    let metadata = &object.metadata;
    let mut findings = Vec::new();
    let selection = match Selection::of(&object.spec) {
        Selection::Invalid(reason) => {
            findings.push(Finding::Selector(reason.clone()));
            Selection::Invalid(reason)
        }
        selection => selection,
    };
    let everything = || vec![Rule::default()];
    // An absent specification is an empty one: it allows nothing.
    let read = match &object.spec {
        Value::Null => Ok(Spec::default()),
        spec => Spec::deserialize(spec),
    };
    let (action, rules) = match read {
        Err(error) => {
            findings.push(Finding::Shape(error.to_string()));
            (Action::Deny, everything())
        }
        Ok(spec) if spec.is_for_waypoints() => {
            return Converted::nothing(selection, vec![Finding::TargetRefs]);
        }
        Ok(spec) => {
            let unknown: Vec<_> = present(&spec.other).map(ToOwned::to_owned).collect();
            findings.extend(
                unknown
                    .into_iter()
                    .map(|field| Finding::Unsupported { rule: None, field }),
            );
            let action = match spec.action.as_deref() {
                None | Some("ALLOW") => Action::Allow,
                Some("DENY") => Action::Deny,
                Some("CUSTOM") => {
                    // Whom the authorizer would let in is not known, so nobody is.
                    findings.push(Finding::Custom);
                    Action::Deny
                }
                Some("AUDIT") => {
                    findings.push(Finding::Audit);
                    return Converted::nothing(selection, findings);
                }
                Some(action) => {
                    findings.push(Finding::UnknownAction(action.to_owned()));
                    let rules = everything();
                    return Converted::new(metadata, root_namespace, selection, Action::Deny, rules, findings);
                }
            };
            let specs = spec.rules.unwrap_or_default();
            if specs.is_empty() && action == Action::Deny {
                findings.push(Finding::NoRules(if findings.contains(&Finding::Custom) {
                    "CUSTOM"
                } else {
                    "DENY"
                }));
                return Converted::nothing(selection, findings);
            }
            // What an unknown field of the policy restricts, or a selector that cannot be read, is not known.
            let allows_nothing =
                action == Action::Allow && (!findings.is_empty() || matches!(selection, Selection::Invalid(_)));
            let mut reader = Reader {
                action,
                namespace: &metadata.namespace,
                rule: 0,
                findings,
                refused: false,
            };
            let rules: Vec<_> = specs
                .into_iter()
                .enumerate()
                .filter_map(|(index, spec)| reader.rule(index, spec))
                .collect();
            findings = reader.findings;
            (action, if allows_nothing { Vec::new() } else { rules })
        }
    };
    Converted::new(metadata, root_namespace, selection, action, rules, findings)
}

impl Spec {
    fn is_for_waypoints(&self) -> bool {
        self.target_ref.is_some() || self.target_refs.as_ref().is_some_and(|refs| !refs.is_empty())
    }
}

impl Converted {
    fn nothing(selection: Selection, findings: Vec<Finding>) -> Self {
        Self {
            policy: None,
            selection,
            findings,
            effect: Some("It has no effect here"),
        }
    }

    fn new(
        metadata: &Metadata,
        root_namespace: &str,
        selection: Selection,
        action: Action,
        rules: Vec<Rule>,
        mut findings: Vec<Finding>,
    ) -> Self {
        let scope = match &selection {
            Selection::Some(_) => Scope::Workload,
            _ if &*metadata.namespace == root_namespace => Scope::Global,
            _ => Scope::Namespace,
        };
        let mut policy = Policy::new(&metadata.namespace, &metadata.name, scope, action, rules);
        match metadata.annotations.get(DRY_RUN).map(String::as_str) {
            None | Some("" | "0" | "f" | "F" | "false" | "False" | "FALSE") => {}
            Some("1" | "t" | "T" | "true" | "True" | "TRUE") => policy = policy.dry_run(),
            Some(other) => findings.push(Finding::DryRun(other.to_owned())),
        }
        let harmless = |finding: &Finding| matches!(finding, Finding::NoIdentity { .. } | Finding::DryRun(_));
        let whole = |finding: &Finding| matches!(finding, Finding::Shape(_) | Finding::UnknownAction(_));
        let custom = findings.contains(&Finding::Custom);
        let effect = if policy.dry_run {
            Some("In dry run it refuses nothing; what it would refuse is logged and counted")
        } else if findings.iter().all(harmless) {
            None
        } else if findings.iter().any(whole) {
            Some("Until it is mended, every connection in its scope is denied")
        } else if custom {
            Some("What it would ask the authorizer about is denied")
        } else if action == Action::Allow {
            Some("A rule that allows never matches with these, so less is allowed than written")
        } else {
            Some("A rule that denies matches without these, so more is denied than written")
        };
        Self {
            policy: Some(policy),
            selection,
            findings,
            effect,
        }
    }
}

/// Reads rules and takes note of what it finds.
struct Reader<'a> {
    action: Action,
    namespace: &'a str,
    rule: usize,
    findings: Vec<Finding>,
    /// Whether something in the current rule cannot be honoured.
    refused: bool,
}

impl Reader<'_> {
    /// The rule; none where it would allow and has something that cannot be honoured.
    fn rule(&mut self, index: usize, spec: Option<RuleSpec>) -> Option<Rule> {
        self.rule = index;
        self.refused = false;
        let spec = spec.unwrap_or_else(|| {
            self.empty("the rule (null)");
            RuleSpec::default()
        });
        self.unsupported("", &spec.other);
        let from = spec.from.and_then(|from| self.clause("from", from, Self::source));
        let to = spec.to.and_then(|to| self.clause("to", to, Self::operation));
        let mut clauses: Vec<_> = [to, from].into_iter().flatten().collect();
        for condition in spec.when.unwrap_or_default() {
            clauses.extend(self.clause("when", vec![condition], Self::condition));
        }
        let honoured = !(self.refused && self.action == Action::Allow);
        honoured.then_some(Rule { clauses })
    }

    /// The alternatives as one clause. One that says nothing, for what it said cannot be honoured, always holds, and so
    /// does the clause then.
    fn clause<T>(&mut self, name: &'static str, parts: Vec<T>, read: fn(&mut Self, T) -> Match) -> Option<Clause> {
        if parts.is_empty() {
            if name != "when" {
                self.empty(name);
            }
            return None;
        }
        let matches: Vec<_> = parts.into_iter().map(|part| read(self, part)).collect();
        matches
            .iter()
            .all(|conditions| !conditions.is_empty())
            .then_some(Clause { matches })
    }

    fn source(&mut self, from: From) -> Match {
        self.unsupported("from.", &from.other);
        let before = self.refused;
        let Some(source) = from.source else {
            self.empty("from.source");
            return Match::default();
        };
        self.unsupported("from.source.", &source.other);
        let mut found = Match {
            principals: self.list("from.source.principals", source.principals, principal),
            not_principals: self.negative("from.source.notPrincipals", source.not_principals, principal),
            namespaces: self.list("from.source.namespaces", source.namespaces, pattern),
            not_namespaces: self.negative("from.source.notNamespaces", source.not_namespaces, pattern),
            source_ips: self.list("from.source.ipBlocks", source.ip_blocks, block),
            not_source_ips: self.negative("from.source.notIpBlocks", source.not_ip_blocks, block),
            ..Match::default()
        };
        let namespace = self.namespace;
        let account = |text: &str| service_account(text, namespace);
        found.service_accounts = self.list("from.source.serviceAccounts", source.service_accounts, account);
        let accounts = source.not_service_accounts;
        found.not_service_accounts = self.negative("from.source.notServiceAccounts", accounts, account);
        let domains = self.negative("from.source.notTrustDomains", source.not_trust_domains, trust_domain);
        found.not_principals.extend(domains);
        let domains = self.list("from.source.trustDomains", source.trust_domains, trust_domain);
        if !domains.is_empty() && !found.principals.is_empty() {
            // Both are conditions on one text, and a match has one list of such.
            self.refuse(Finding::Unsupported {
                rule: Some(self.rule),
                field: "from.source.trustDomains beside principals".to_owned(),
            });
        } else if !domains.is_empty() {
            found.principals = domains;
        }
        if found.is_empty() && self.refused == before {
            self.empty("from.source");
        }
        found
    }

    fn operation(&mut self, to: To) -> Match {
        self.unsupported("to.", &to.other);
        let before = self.refused;
        let Some(operation) = to.operation else {
            self.empty("to.operation");
            return Match::default();
        };
        self.unsupported("to.operation.", &operation.other);
        let found = Match {
            destination_ports: self.list("to.operation.ports", operation.ports, port),
            not_destination_ports: self.negative("to.operation.notPorts", operation.not_ports, port),
            ..Match::default()
        };
        if found.is_empty() && self.refused == before {
            self.empty("to.operation");
        }
        found
    }

    fn condition(&mut self, when: Condition) -> Match {
        self.unsupported("when.", &when.other);
        let before = self.refused;
        let Condition {
            key,
            values,
            not_values,
            ..
        } = when;
        let mut found = Match::default();
        let namespace = self.namespace;
        let account = |text: &str| service_account(text, namespace);
        match key.as_str() {
            "source.principal" => {
                found.principals = self.list("source.principal", values, principal);
                found.not_principals = self.negative("source.principal", not_values, principal);
            }
            "source.trustDomain" => {
                found.principals = self.list("source.trustDomain", values, trust_domain);
                found.not_principals = self.negative("source.trustDomain", not_values, trust_domain);
            }
            "source.namespace" => {
                found.namespaces = self.list("source.namespace", values, pattern);
                found.not_namespaces = self.negative("source.namespace", not_values, pattern);
            }
            "source.serviceAccount" => {
                found.service_accounts = self.list("source.serviceAccount", values, account);
                found.not_service_accounts = self.negative("source.serviceAccount", not_values, account);
            }
            "source.ip" => {
                found.source_ips = self.list("source.ip", values, block);
                found.not_source_ips = self.negative("source.ip", not_values, block);
            }
            "destination.ip" => {
                found.destination_ips = self.list("destination.ip", values, block);
                found.not_destination_ips = self.negative("destination.ip", not_values, block);
            }
            "destination.port" => {
                found.destination_ports = self.list("destination.port", values, port);
                found.not_destination_ports = self.negative("destination.port", not_values, port);
            }
            _ => self.refuse(Finding::Unsupported {
                rule: Some(self.rule),
                field: format!("when {key:?}"),
            }),
        }
        if found.is_empty() && self.refused == before {
            self.empty("when (no values)");
        }
        found
    }

    /// A list of which any value is to match. Without a value that cannot be read it would match less, so where it denies
    /// all of it goes.
    fn list<T>(&mut self, field: &'static str, texts: Values, read: impl Fn(&str) -> Result<T, Fault>) -> Vec<T> {
        let texts = texts.unwrap_or_default();
        let values = self.read(field, &texts, read);
        if values.len() == texts.len() {
            values
        } else {
            Vec::new()
        }
    }

    /// A list of which no value is to match. Without a value that cannot be read it matches more, as it shall where it
    /// denies.
    fn negative<T>(&mut self, field: &'static str, texts: Values, read: impl Fn(&str) -> Result<T, Fault>) -> Vec<T> {
        self.read(field, &texts.unwrap_or_default(), read)
    }

    fn read<T>(&mut self, field: &'static str, texts: &[String], read: impl Fn(&str) -> Result<T, Fault>) -> Vec<T> {
        let rule = self.rule;
        let mut values = Vec::with_capacity(texts.len());
        for text in texts {
            match read(text) {
                Ok(value) => values.push(value),
                Err(Fault(reason)) => self.refuse(Finding::Value {
                    rule,
                    field,
                    value: text.clone(),
                    reason,
                }),
            }
            let is_principal = field.ends_with("rincipals") || field == "source.principal";
            if is_principal && !text.contains('*') && !text.is_empty() && !text.starts_with("spiffe:") {
                let id = SpiffeId::parse(&format!("spiffe://{text}"));
                if id.is_err() {
                    let value = text.clone();
                    self.findings.push(Finding::NoIdentity { rule, field, value });
                }
            }
        }
        values
    }

    fn unsupported(&mut self, path: &str, other: &Map<String, Value>) {
        for field in present(other) {
            self.refuse(Finding::Unsupported {
                rule: Some(self.rule),
                field: format!("{path}{field}"),
            });
        }
    }

    fn empty(&mut self, part: &'static str) {
        self.refuse(Finding::Empty { rule: self.rule, part });
    }

    fn refuse(&mut self, finding: Finding) {
        self.refused = true;
        self.findings.push(finding);
    }
}

/// Why a value cannot be read.
struct Fault(String);

fn pattern(text: &str) -> Result<StringMatch, Fault> {
    StringMatch::from_str(text).map_err(|error| Fault(error.to_string()))
}

fn principal(text: &str) -> Result<StringMatch, Fault> {
    match text.starts_with("spiffe:") {
        true => Err(Fault("principals are written without spiffe://".to_owned())),
        false => pattern(text),
    }
}

/// A trust domain as the beginning of a principal.
fn trust_domain(text: &str) -> Result<StringMatch, Fault> {
    match pattern(text)? {
        _ if text.contains('/') => Err(Fault("a trust domain has no `/`".to_owned())),
        StringMatch::Exact(domain) => Ok(StringMatch::Prefix(format!("{domain}/"))),
        StringMatch::Suffix(_) => Err(Fault(
            "a trust domain with `*` at its beginning is not supported".to_owned(),
        )),
        pattern => Ok(pattern),
    }
}

fn service_account(text: &str, own_namespace: &str) -> Result<ServiceAccountMatch, Fault> {
    let (namespace, name) = text.split_once('/').unwrap_or((own_namespace, text));
    let proper = |part: &str| !part.is_empty() && !part.contains(['/', '*']);
    if !proper(namespace) || !proper(name) {
        return Err(Fault("not a service account; write namespace/name or name".to_owned()));
    }
    Ok(ServiceAccountMatch {
        namespace: namespace.to_owned(),
        service_account: name.to_owned(),
    })
}

fn block(text: &str) -> Result<IpBlock, Fault> {
    IpBlock::from_str(text).map_err(|error| Fault(error.to_string()))
}

fn port(text: &str) -> Result<u16, Fault> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| Fault("not a port; write a number up to 65535".to_owned()))
}
