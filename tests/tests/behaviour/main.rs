//! What Adit does, one module per behaviour, on a bed of real namespaces with the real programs.

mod bed;
