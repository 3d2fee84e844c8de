// Package ops holds the doctor: it looks at what lapse rests on and says what is wrong there, why that matters, and how to mend it.
//
// Each check is made on the real thing (a session, an EXPLAIN, a message) rather than read from a configuration, since what people get wrong
// is the difference between the two.
package ops
