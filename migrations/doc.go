// Package migrations holds lapse's tables as embedded SQL and brings a database up or down to a version.
//
// DDL is not transactional in MySQL: a file of several statements that fails in the middle can neither go on nor back. So every
// file has exactly one statement, and a lock on one pinned connection keeps two deployments from running at once. The rule for
// changes is expand, then contract: a binary made for version N runs on N and on N+1.
package migrations
