//! Further names of the mesh's trust domain, in policies: who bears one is known to them by the mesh's own.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::policy_model::{PolicySet, StringMatch};
use super::{Mesh, Policy};
use crate::identity::TrustDomain;

/// The further names, and what was made last of which policies.
#[derive(Default)]
pub(super) struct Aliases {
    names: Vec<TrustDomain>,
    last: Mutex<Option<(Arc<PolicySet>, Arc<PolicySet>)>>,
}

impl Aliases {
    pub(super) fn new(names: Vec<TrustDomain>) -> Self {
        Self {
            names,
            last: Mutex::default(),
        }
    }

    /// Writes the principals of the mesh's policies with its own trust domain where they have an alias.
    pub(super) fn resolve(&self, mesh: &mut Mesh) {
        if self.names.is_empty() {
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((given, resolved)) = &*last {
            // What has not changed stays the very same, so that nobody takes it for a change.
            if Arc::ptr_eq(resolved, &mesh.policies) {
                return;
            }
            if Arc::ptr_eq(given, &mesh.policies) {
                mesh.policies = Arc::clone(resolved);
                return;
            }
        }
        let given = Arc::clone(&mesh.policies);
        let policies = given.iter().map(|policy| self.resolved(policy, mesh.trust_domain()));
        let resolved = Arc::new(PolicySet::new(policies));
        mesh.policies = Arc::clone(&resolved);
        *last = Some((given, resolved));
    }

    fn resolved(&self, policy: &Policy, home: &TrustDomain) -> Policy {
        let mut policy = policy.clone();
        let matches = policy
            .rules
            .iter_mut()
            .flat_map(|rule| &mut rule.clauses)
            .flat_map(|clause| &mut clause.matches);
        for conditions in matches {
            for principal in conditions.principals.iter_mut().chain(&mut conditions.not_principals) {
                let (StringMatch::Exact(text) | StringMatch::Prefix(text)) = principal else {
                    continue;
                };
                let rest = self.names.iter().find_map(|alias| {
                    let rest = text.strip_prefix(alias.as_str())?;
                    rest.starts_with('/').then(|| rest.to_owned())
                });
                if let Some(rest) = rest {
                    *text = format!("{home}{rest}");
                }
            }
        }
        policy
    }
}

impl fmt::Debug for Aliases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Aliases").field(&self.names).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Action, Clause, Match, MeshHandle, MeshParts, Rule, Scope};

    fn mesh(principals: &[&str]) -> Mesh {
        let mut parts = MeshParts::new(TrustDomain::parse("new.example").unwrap(), "cluster.local");
        let conditions = Match {
            principals: principals.iter().map(|text| text.parse().unwrap()).collect(),
            ..Match::default()
        };
        let clauses = vec![Clause {
            matches: vec![conditions],
        }];
        let rules = vec![Rule { clauses }];
        parts
            .policies
            .push(Policy::new("shop", "p", Scope::Namespace, Action::Allow, rules));
        Mesh::build(parts).unwrap()
    }

    fn principals(mesh: &Mesh) -> Vec<StringMatch> {
        let policy = mesh.policies().iter().next().unwrap();
        policy.rules[0].clauses[0].matches[0].principals.clone()
    }

    #[test]
    fn principals_of_an_alias_mean_the_meshs_own_domain_and_unchanged_policies_stay_the_same() {
        let before = mesh(&[
            "old.example/ns/a/sa/b",
            "old.example/*",
            "*/sa/c",
            "old.example.org/ns/a/sa/b",
            "*",
        ]);
        let after = mesh(&[
            "new.example/ns/a/sa/b",
            "new.example/*",
            "*/sa/c",
            "old.example.org/ns/a/sa/b",
            "*",
        ]);
        let handle = MeshHandle::new(before.clone());
        handle.set_aliases(vec![TrustDomain::parse("old.example").unwrap()]);
        let first = handle.load();
        assert_eq!(principals(&first), principals(&after));
        for again in [before.clone(), (*first).clone()] {
            handle.publish(again);
            assert!(Arc::ptr_eq(&first.policies, &handle.load().policies));
        }
        handle.publish(mesh(&["old.example/ns/a/sa/d"]));
        assert_eq!(
            principals(&handle.load()),
            principals(&mesh(&["new.example/ns/a/sa/d"]))
        );
    }
}
