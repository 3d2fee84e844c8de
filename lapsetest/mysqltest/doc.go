// Package mysqltest gives a test a fresh, migrated database on a real MySQL or MariaDB.
//
// A test's rows must be its own: audit queries and counters look at whole tables, and tests run side by side. So each test gets a
// database of its own, dropped at its end. It is a package beside lapsetest, and not in it, so that tests of database code do not link
// a RocketMQ endpoint.
package mysqltest
