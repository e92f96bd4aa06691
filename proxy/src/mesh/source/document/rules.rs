//! The rules of policies in the document: `from` and `to` are each one clause.

use std::str::FromStr;

use serde::Deserialize;
use serde_saphyr::Spanned;

use super::port_number;
use crate::mesh::source::fault::{Fault, Misplaced};
use crate::mesh::{Clause, IpBlock, Match, Rule, ServiceAccountMatch, StringMatch};

type Values = Option<Spanned<Vec<Spanned<String>>>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RuleSpec {
    #[serde(default)]
    from: Option<Spanned<Vec<Spanned<FromSpec>>>>,
    #[serde(default)]
    to: Option<Spanned<Vec<Spanned<ToSpec>>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FromSpec {
    #[serde(default)]
    principals: Values,
    #[serde(default)]
    not_principals: Values,
    #[serde(default)]
    namespaces: Values,
    #[serde(default)]
    not_namespaces: Values,
    #[serde(default)]
    service_accounts: Values,
    #[serde(default)]
    not_service_accounts: Values,
    #[serde(default)]
    ip_blocks: Values,
    #[serde(default)]
    not_ip_blocks: Values,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ToSpec {
    #[serde(default)]
    ports: Values,
    #[serde(default)]
    not_ports: Values,
    #[serde(default)]
    ip_blocks: Values,
    #[serde(default)]
    not_ip_blocks: Values,
}

impl RuleSpec {
    /// The rule, in a policy of the namespace.
    pub(super) fn into_rule(self, namespace: &str) -> Result<Rule, Misplaced> {
        let from = self.from.map(|from| {
            clause("from", from, |from| {
                let account = |text: &Spanned<String>| service_account(text, namespace);
                Ok(Match {
                    principals: values("principals", from.principals, principal)?,
                    not_principals: values("notPrincipals", from.not_principals, principal)?,
                    namespaces: values("namespaces", from.namespaces, pattern)?,
                    not_namespaces: values("notNamespaces", from.not_namespaces, pattern)?,
                    service_accounts: values("serviceAccounts", from.service_accounts, account)?,
                    not_service_accounts: values("notServiceAccounts", from.not_service_accounts, account)?,
                    source_ips: values("ipBlocks", from.ip_blocks, block)?,
                    not_source_ips: values("notIpBlocks", from.not_ip_blocks, block)?,
                    ..Match::default()
                })
            })
        });
        let to = self.to.map(|to| {
            clause("to", to, |to| {
                Ok(Match {
                    destination_ports: values("ports", to.ports, port_number)?,
                    not_destination_ports: values("notPorts", to.not_ports, port_number)?,
                    destination_ips: values("ipBlocks", to.ip_blocks, block)?,
                    not_destination_ips: values("notIpBlocks", to.not_ip_blocks, block)?,
                    ..Match::default()
                })
            })
        });
        let clauses = [from, to].into_iter().flatten().collect::<Result<_, _>>()?;
        Ok(Rule { clauses })
    }
}

/// One clause. An empty list would match everything and an empty match nothing, neither of which a reader expects.
fn clause<T>(
    name: &'static str,
    matches: Spanned<Vec<Spanned<T>>>,
    to_match: impl Fn(T) -> Result<Match, Misplaced>,
) -> Result<Clause, Misplaced> {
    if matches.value.is_empty() {
        return Err(Fault::EmptyList(name).at(matches.referenced));
    }
    let checked = |spec: Spanned<T>| {
        let conditions = to_match(spec.value)?;
        match conditions.is_empty() {
            true => Err(Fault::EmptyMatch.at(spec.referenced)),
            false => Ok(conditions),
        }
    };
    let matches = matches.value.into_iter().map(checked).collect::<Result<_, _>>()?;
    Ok(Clause { matches })
}

fn values<T>(
    name: &'static str,
    texts: Values,
    parse: impl Fn(&Spanned<String>) -> Result<T, Misplaced>,
) -> Result<Vec<T>, Misplaced> {
    match texts {
        None => Ok(Vec::new()),
        Some(texts) if texts.value.is_empty() => Err(Fault::EmptyList(name).at(texts.referenced)),
        Some(texts) => texts.value.iter().map(parse).collect(),
    }
}

fn pattern(text: &Spanned<String>) -> Result<StringMatch, Misplaced> {
    StringMatch::from_str(&text.value).map_err(|error| Fault::Pattern(text.value.clone(), error).at(text.referenced))
}

fn principal(text: &Spanned<String>) -> Result<StringMatch, Misplaced> {
    match text.value.starts_with("spiffe:") {
        true => Err(Fault::Scheme(text.value.clone()).at(text.referenced)),
        false => pattern(text),
    }
}

fn service_account(text: &Spanned<String>, own_namespace: &str) -> Result<ServiceAccountMatch, Misplaced> {
    let (namespace, name) = text.value.split_once('/').unwrap_or((own_namespace, &text.value));
    let proper = |part: &str| !part.is_empty() && !part.contains(['/', '*']);
    if !proper(namespace) || !proper(name) {
        return Err(Fault::ServiceAccount(text.value.clone()).at(text.referenced));
    }
    Ok(ServiceAccountMatch {
        namespace: namespace.to_owned(),
        service_account: name.to_owned(),
    })
}

fn block(text: &Spanned<String>) -> Result<IpBlock, Misplaced> {
    IpBlock::from_str(&text.value).map_err(|error| Fault::Block(text.value.clone(), error).at(text.referenced))
}
