//! `adit node`: the layers put together into a running proxy.

use anyhow::bail;

use super::settings::NodeSettings;

/// Runs the proxy of this node until it is told to stop and has drained.
pub async fn run(settings: NodeSettings) -> anyhow::Result<()> {
    bail!("the proxy of node {} is not wired yet", settings.node_name)
}
