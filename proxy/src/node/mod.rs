//! The pods of this node: network namespaces, enrolment, removal.
