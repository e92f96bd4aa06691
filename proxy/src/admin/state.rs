//! The parts of the state query. Each layer gives its own, so that this one need not know them.

use std::fmt;

use serde_json::{Map, Value};

type Provider = Box<dyn Fn() -> Value + Send + Sync>;

/// Named parts of the state, in the order in which they were added.
#[derive(Default)]
pub struct StateSections(Vec<(&'static str, Provider)>);

impl StateSections {
    /// Adds a part. `provider` is called for each query, on a thread where it may take its time.
    #[must_use]
    pub fn with(mut self, name: &'static str, provider: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        self.0.push((name, Box::new(provider)));
        self
    }

    /// The parts' names.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(name, _)| *name)
    }

    /// One part.
    pub fn one(&self, name: &str) -> Option<Value> {
        self.0
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, provider)| provider())
    }

    /// All parts.
    pub fn all(&self) -> Value {
        self.0
            .iter()
            .map(|(name, provider)| ((*name).to_owned(), provider()))
            .collect::<Map<_, _>>()
            .into()
    }
}

impl fmt::Debug for StateSections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
