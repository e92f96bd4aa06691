//! What of a workload's traffic is left alone, in the document.

use std::sync::Arc;

use serde::Deserialize;
use serde_saphyr::Spanned;

use crate::mesh::exclusions::{cidr, inbound_ports, outbound_cidrs, outbound_ports};
use crate::mesh::source::fault::{Fault, Misplaced};
use crate::mesh::{ExclusionError, Exclusions};

type Texts = Option<Spanned<Vec<Spanned<String>>>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ExcludeSpec {
    #[serde(default)]
    inbound_ports: Texts,
    #[serde(default)]
    outbound_ports: Texts,
    #[serde(default)]
    outbound_cidrs: Texts,
}

impl ExcludeSpec {
    /// None where nothing is excluded.
    pub(super) fn into_exclusions(self) -> Result<Option<Arc<Exclusions>>, Misplaced> {
        let exclusions = Exclusions {
            inbound_ports: list("inboundPorts", self.inbound_ports, str::parse, inbound_ports)?,
            outbound_ports: list("outboundPorts", self.outbound_ports, str::parse, outbound_ports)?,
            outbound_cidrs: list("outboundCidrs", self.outbound_cidrs, cidr, outbound_cidrs)?,
        };
        Ok((!exclusions.is_empty()).then(|| Arc::new(exclusions)))
    }
}

/// A fault of an item is told at its place, one of all together at the list's.
fn list<T>(
    name: &'static str,
    texts: Texts,
    parse: impl Fn(&str) -> Result<T, ExclusionError>,
    all: impl FnOnce(Vec<T>) -> Result<Vec<T>, ExclusionError>,
) -> Result<Vec<T>, Misplaced> {
    let Some(texts) = texts else { return Ok(Vec::new()) };
    let item = |text: &Spanned<String>| {
        parse(text.value.trim()).map_err(|error| Fault::Exclusion(name, error).at(text.referenced))
    };
    let items = texts.value.iter().map(item).collect::<Result<_, _>>()?;
    all(items).map_err(|error| Fault::Exclusion(name, error).at(texts.referenced))
}
