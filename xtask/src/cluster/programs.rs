//! The programs of a cluster: Kubernetes, etcd and Helm, at the versions that `tests/cluster/` pins.

use crate::go::{Build, Module, Programs};

/// All of them.
pub(crate) const KUBERNETES: Programs = Programs {
    what: "Kubernetes and Helm",
    variable: "ADIT_K8S_BIN",
    cache: "k8s",
    version_of: "k8s.io/kubernetes",
    modules: &[
        Module {
            folder: "tests/cluster/kube",
            files: &["main.go"],
            cgo: false,
            builds: &[Build {
                name: "kube",
                package: ".",
                link: "-s -w -X k8s.io/component-base/version.gitVersion=vVERSION",
                programs: &[
                    "etcd",
                    "kube-apiserver",
                    "kube-controller-manager",
                    "kube-scheduler",
                    "kube-proxy",
                    "kubelet",
                    "kubectl",
                ],
            }],
        },
        Module {
            folder: "tests/cluster/helm",
            files: &[],
            cgo: false,
            builds: &[Build {
                name: "helm",
                package: "helm.sh/helm/v4/cmd/helm",
                link: "-s -w",
                programs: &[],
            }],
        },
    ],
};
