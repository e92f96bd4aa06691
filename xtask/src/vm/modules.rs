//! Kernel modules: which the tests need, and in which order they can be loaded.

use anyhow::{Context as _, Result};

/// The modules that the tests need, with what the kernel would otherwise load on demand: there is no `modprobe` in
/// the machine. A kernel may have some of them built in.
pub(crate) const WANTED: &[&str] = &[
    "veth",
    "bridge",
    "dummy",
    "tun",
    "af_packet",
    "inet_diag",
    "tcp_diag",
    "vsock",
    "tls",
    "sch_netem",
    "virtio_pci",
    "virtio_rng",
];

/// The text of `modules.dep`: a line `path: dependency…` for each module.
pub(crate) struct Dependencies<'a> {
    lines: Vec<(&'a str, Vec<&'a str>)>,
}

impl<'a> Dependencies<'a> {
    /// Reads `modules.dep`.
    pub(crate) fn parse(text: &'a str) -> Dependencies<'a> {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        Dependencies {
            lines: lines
                .map(|(path, rest)| (path, rest.split_whitespace().collect()))
                .collect(),
        }
    }

    /// The files to load, each after those that it depends on and each once. Names that `builtin`, the text of
    /// `modules.builtin`, lists need no file.
    pub(crate) fn load_order(&self, names: &[&str], builtin: &str) -> Result<Vec<&'a str>> {
        let mut order = Vec::new();
        for name in names {
            if builtin.lines().any(|path| module_name(path) == *name) {
                continue;
            }
            let found = self.lines.iter().find(|(path, _)| module_name(path) == *name);
            let (path, _) = found.with_context(|| format!("the kernel has no module {name}"))?;
            self.add(path, &mut order);
        }
        Ok(order)
    }

    fn add(&self, path: &'a str, order: &mut Vec<&'a str>) {
        if order.contains(&path) {
            return;
        }
        for (_, dependencies) in self.lines.iter().filter(|(candidate, _)| *candidate == path) {
            // depmod refuses cycles, so this ends.
            dependencies.iter().for_each(|dependency| self.add(dependency, order));
        }
        order.push(path);
    }
}

/// `kernel/net/vmw_vsock/vsock.ko.xz` is the module `vsock`; a dash in a file's name is an underscore in the module's.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/net/bridge/bridge.ko: kernel/net/802/stp.ko kernel/net/llc/llc.ko\n\
        kernel/net/802/stp.ko: kernel/net/llc/llc.ko\n\
        kernel/net/llc/llc.ko:\n\
        kernel/drivers/net/veth.ko.xz:\n\
        kernel/drivers/virtio/virtio-rng.ko:\n";

    fn order(names: &[&str]) -> Result<Vec<&'static str>> {
        Dependencies::parse(DEP).load_order(names, "kernel/net/packet/af_packet.ko\n")
    }

    #[test]
    fn a_module_comes_after_what_it_depends_on_and_once() {
        let expected = [
            "kernel/net/llc/llc.ko",
            "kernel/net/802/stp.ko",
            "kernel/net/bridge/bridge.ko",
        ];
        assert_eq!(order(&["bridge", "stp", "bridge"]).unwrap(), expected);
    }

    #[test]
    fn compressed_files_and_dashes_in_names_are_understood() {
        assert_eq!(
            order(&["veth", "virtio_rng"]).unwrap(),
            ["kernel/drivers/net/veth.ko.xz", "kernel/drivers/virtio/virtio-rng.ko"]
        );
    }

    #[test]
    fn what_is_built_in_needs_no_file() {
        assert!(order(&["af_packet"]).unwrap().is_empty());
    }

    #[test]
    fn a_module_that_does_not_exist_is_named() {
        assert!(order(&["wormhole"]).unwrap_err().to_string().contains("wormhole"));
    }
}
