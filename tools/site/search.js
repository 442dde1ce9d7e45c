/* Material's search looks for words that begin with those of the query. Without its ending, "stopping" finds "stopped",
   too. Material has no setting for it: its stemmer changes the index, but no word of a query that is still typed. */
"use strict";
const QUERY = 2; // the type of a message to the worker that searches
const ENDING = /(?<=[aeiouy]\w*?)(?:([bdgmnprt])\1)?(?:ing|ed|es|(?<!s)s)(?=\s|$)/gi; // what is left has a vowel
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const found = message.type === QUERY ? { ...message, data: message.data.replace(ENDING, "$1") } : message;
  return post.call(this, found, ...rest);
};
